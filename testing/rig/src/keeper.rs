//! Starting processes that do not outlive this one.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};
use std::{io, thread};

type Job = (Command, Sender<io::Result<Child>>);

/// A command that the kernel kills when the thread that starts it ends: to be given its arguments and then to [`spawn`].
///
/// Without `setpriv` (util-linux) nothing is promised, and [`crate::Remains`] has to do.
pub fn bound(program: &Path) -> Command {
    let Some(setpriv) = crate::find_program("setpriv") else { return Command::new(program) };
    let mut command = Command::new(setpriv);
    command.args(["--pdeathsig", "KILL", "--"]).arg(program);
    command
}

/// Starts `command`, made with [`bound`], in a process group of its own (Ctrl-C at the terminal is for the owner to handle, in order).
/// One thread, which lives as long as this process, starts all of them.
///
/// # Errors
/// When the program cannot be started.
pub fn spawn(mut command: Command) -> io::Result<Child> {
    static KEEPER: OnceLock<Sender<Job>> = OnceLock::new();
    let keeper = KEEPER.get_or_init(|| {
        let (jobs, queue) = channel::<Job>();
        thread::spawn(move || {
            while let Ok((mut command, answer)) = queue.recv() {
                // Whoever asked waits for the answer, unless this process ends.
                let _ = answer.send(command.spawn());
            }
        });
        jobs
    });
    let gone = || io::Error::other("the thread that starts processes is gone");
    let (answer, started) = channel();
    command.process_group(0);
    keeper.send((command, answer)).map_err(|_| gone())?;
    started.recv().map_err(|_| gone())?
}
