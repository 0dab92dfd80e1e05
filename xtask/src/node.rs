//! A kubelet on a stage, for the commands that show one: started, watched, and ended; what it leaves is named.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use rig::{Stage, cgroup, mounts};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::shell::Shell;

/// The running kubelet and where it works.
pub(crate) struct Node {
    /// As it calls itself in messages.
    name: String,
    child: Child,
    /// The KubeletConfiguration.
    pub(crate) config: Value,
    /// `--root-dir`.
    pub(crate) root: PathBuf,
    /// Its log.
    pub(crate) log: PathBuf,
    /// `staticPodPath`.
    pub(crate) manifests: PathBuf,
}

impl Node {
    /// Starts `program` in the stage's directory, with `fields` over the usual configuration and with more flags.
    ///
    /// # Errors
    /// When a file cannot be written or the program does not start.
    pub(crate) fn start(stage: &Stage, program: &Path, fields: &Value, flags: &[String]) -> Result<Self> {
        Self::start_in(stage.dir(), &stage.socket(), stage.cgroup(), program, fields, flags)
    }

    /// The same without a stage: in a directory, on the runtime at a socket, with a cgroup root.
    ///
    /// # Errors
    /// As [`Node::start`].
    pub(crate) fn start_in(
        dir: &Path,
        socket: &Path,
        cgroup: &str,
        program: &Path,
        fields: &Value,
        flags: &[String],
    ) -> Result<Self> {
        let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let (root, manifests, log) = (dir.join("root"), dir.join("manifests"), dir.join(format!("{name}.log")));
        for sub in [&root, &manifests] {
            fs::create_dir_all(sub).with_context(|| format!("cannot make {}", sub.display()))?;
        }
        let mut config = rig::kubelet::config(socket, dir, cgroup).context("no free port on the loopback address")?;
        for (key, value) in fields.as_object().into_iter().flatten() {
            config[key] = value.clone();
        }
        let file = dir.join("kubelet.json");
        fs::write(&file, serde_json::to_vec_pretty(&config)?)?;
        let output = fs::File::create(&log)?;
        let mut command = rig::bound(program);
        command.arg("--config").arg(&file).arg("--root-dir").arg(&root).args(["--v", "2"]);
        command.env("RUBELET_DEVICE_PLUGINS_DIR", "device-plugins");
        command.arg(format!("--cert-dir={}", dir.join("pki").display())).args(flags);
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let child = rig::spawn(command).with_context(|| format!("cannot start {}", program.display()))?;
        Ok(Self { name, child, config, root, log, manifests })
    }

    /// Its process id.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its CPU time so far, in seconds.
    ///
    /// # Errors
    /// It is gone.
    pub(crate) fn cpu(&self) -> Result<f64> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid()))?;
        let rest = stat.rsplit_once(')').context("not a stat file")?.1;
        let ticks: u64 = rest.split_whitespace().skip(11).take(2).filter_map(|n| n.parse::<u64>().ok()).sum();
        Ok(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
    }

    /// Its memory in KiB, at one moment, by the names that proc(5) has for kinds of it (`VmRSS`).
    ///
    /// # Errors
    /// It is gone.
    pub(crate) fn memory<const N: usize>(&self, names: [&str; N]) -> Result<[u64; N]> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid()))?;
        let mut found = [0; N];
        for (kib, name) in found.iter_mut().zip(names) {
            *kib = rig::kib(&status, name).with_context(|| format!("{name} is not known"))?;
        }
        Ok(found)
    }

    /// Waits; it must live on.
    ///
    /// # Errors
    /// It ended, or somebody interrupts.
    pub(crate) fn pause(&mut self, shell: &Shell, time: Duration) -> Result<()> {
        shell.wait(time, || false)?;
        self.ended()
    }

    /// An error with the end of its log.
    pub(crate) fn fail(&self, what: &str) -> anyhow::Error {
        anyhow!("{what}; the end of {}'s log:\n{}", self.name, rig::tail(&self.log, 25))
    }

    /// An error when it is no longer there.
    pub(crate) fn ended(&mut self) -> Result<()> {
        match self.child.try_wait() {
            Ok(Some(status)) => Err(self.fail(&format!("{} ended by itself ({status})", self.name))),
            _ => Ok(()),
        }
    }

    /// True while it runs.
    pub(crate) fn running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Ends it with `SIGTERM`; true when it did, within 10 s. Else it is killed.
    pub(crate) fn stop(&mut self) -> bool {
        if let Some(pid) = Pid::from_raw(self.child.id().cast_signed()).filter(|_| self.running()) {
            let _ = kill_process(pid, Signal::TERM);
        }
        let ended = rig::poll(Duration::from_secs(10), || !self.running());
        if !ended {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        ended
    }

    /// What there still is of its pods.
    pub(crate) fn remains(&self, stage: &Stage) -> Vec<String> {
        let is_pod = |p: &PathBuf| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("pod"));
        let cgroups = cgroup::tree(stage.cgroup()).into_iter().filter(is_pod);
        let pods = self.root.join("pods");
        let dirs = fs::read_dir(&pods).into_iter().flatten().flatten().map(|e| e.path());
        let shims =
            rig::processes::working_in(stage.dir()).into_iter().filter(|(_, p)| *p == rig::processes::Program::Shim);
        cgroups
            .map(|p| format!("cgroup {}", p.display()))
            .chain(mounts::below(&pods).iter().map(|p| format!("mount {}", p.display())))
            .chain(dirs.map(|p| format!("directory {}", p.display())))
            .chain(shims.map(|(pid, _)| format!("shim {pid}")))
            .collect()
    }
}

/// A measurement of a node, which waits for it.
pub(crate) trait Bench {
    /// Where an interruption is seen, and the node.
    fn parts(&mut self) -> (&Shell, &mut Node);

    /// See [`Node::pause`].
    fn pause(&mut self, time: Duration) -> Result<()> {
        let (shell, node) = self.parts();
        node.pause(shell, time)
    }

    /// Waits until something is so, and looks every `step`.
    ///
    /// # Errors
    /// It is not within the limit; the node ended; it cannot be found out.
    fn until(
        &mut self,
        what: &str,
        limit: Duration,
        step: Duration,
        mut met: impl FnMut(&mut Self) -> Result<bool>,
    ) -> Result<()> {
        let begin = Instant::now();
        while !met(self)? {
            if begin.elapsed() > limit {
                return Err(self.parts().1.fail(&format!("not within {} s: {what}", limit.as_secs())));
            }
            self.pause(step)?;
        }
        Ok(())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
