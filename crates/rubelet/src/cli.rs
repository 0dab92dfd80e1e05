//! What the first argument means: run the agent, or answer a person.
//!
//! Under the name `kubelet` the program is the drop-in and nothing else. Under any other name `check`, `pods`, `explain`,
//! `version` and `help` are its commands, and flags alone are the agent's; the agent's arguments are handed on untouched.

use std::path::{Path, PathBuf};

use clap::{Args, CommandFactory, Parser, Subcommand, error::ErrorKind};

use crate::table::{ColorChoice, Style};
use crate::version;

/// Exit code of a command line that cannot be understood.
pub(crate) const USAGE: i32 = 2;

/// What a command line asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    /// Run the agent with these kubelet flags.
    Agent(Vec<String>),
    /// `check`.
    Check(CheckArgs),
    /// `pods`.
    Pods(PodsArgs),
    /// `explain …`.
    Explain(ExplainArgs),
    /// `version`.
    Version,
    /// `help`, or `--help` of a command: this text.
    Help(String),
}

/// A command line that cannot be understood: what is wrong and what could be meant. Exit code [`USAGE`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Usage(pub(crate) String);

/// How the process goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// As the agent, with these kubelet flags.
    Agent(Vec<String>),
    /// A person was answered; exit with this code.
    Done(i32),
}

/// Parses the command line and answers if it is a person's. `argv` includes the program's name. Blocks until the answer is
/// written; must not be called within a tokio runtime.
pub(crate) fn start(argv: &[String]) -> Start {
    let code = match parse(argv) {
        Ok(Command::Agent(args)) => return Start::Agent(args),
        Ok(Command::Check(args)) => crate::check::run(&args.flags, args.output),
        Ok(Command::Pods(args)) => crate::pods::run(&args),
        Ok(Command::Explain(args)) => crate::explain::run(&args),
        Ok(Command::Version) => {
            let (own, kubernetes) = (version::RUBELET, version::KUBERNETES);
            print(&format!("rubelet {own} (Kubernetes {kubernetes}, commit {})\n", version::COMMIT));
            0
        }
        Ok(Command::Help(text)) => {
            print(&text);
            0
        }
        Err(Usage(text)) => {
            eprint!("{text}");
            USAGE
        }
    };
    Start::Done(code)
}

/// Writes to standard output; a reader that went away (`| head`) is no fault.
pub(crate) fn print(text: &str) {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

#[derive(Debug, Parser)]
#[command(
    name = "rubelet",
    about = "The node agent of Kubernetes",
    override_usage = "rubelet [KUBELET FLAGS]\n       rubelet COMMAND",
    disable_version_flag = true,
    subcommand_required = true,
    after_help = "Without a command the agent runs; it takes the kubelet's flags (rubelet --help lists them).\n\
                  Started under the name kubelet, the program is the agent only."
)]
struct Cli {
    #[command(subcommand)]
    command: Sub,
}

#[derive(Debug, Subcommand)]
enum Sub {
    /// Is this host fit to be a node? Takes the agent's flags, so that it looks at what the agent would use
    #[command(
        override_usage = "rubelet check [--json] [--color WHEN] [KUBELET FLAGS]",
        after_help = "Exit code: 0 no errors (warnings may be there), 1 errors, 2 wrong usage."
    )]
    Check(CheckArgs),
    /// The pods of the running agent: what each is at, since when, what it waits for
    Pods(PodsArgs),
    /// Why a pod does not run, or why the node is not ready
    Explain(ExplainArgs),
    /// The version
    Version,
}

/// How an answer is written.
#[derive(Args, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Output {
    /// Answer as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// When to use colours; auto: on a terminal, unless NO_COLOR is set
    #[arg(long, value_enum, default_value_t, value_name = "WHEN")]
    pub(crate) color: ColorChoice,
}

impl Output {
    /// The style for standard output.
    pub(crate) fn style(self) -> Style {
        Style::of_stdout(self.color)
    }
}

/// Which agent is asked.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub(crate) struct Agent {
    /// The --root-dir that the agent runs with
    #[arg(long, default_value = "/var/lib/kubelet", value_name = "DIR")]
    pub(crate) root_dir: PathBuf,
}

impl Agent {
    /// Asks the running agent.
    ///
    /// # Errors
    /// The text for standard error: what failed and what to do.
    pub(crate) fn get<T: serde::de::DeserializeOwned>(&self, path: &str) -> Result<T, String> {
        ask(&self.root_dir, path).map_err(|error| crate::table::chain(&error))
    }
}

/// Asks the agent that runs with this root directory.
///
/// # Errors
/// See [`serve::client::ClientError`].
pub(crate) fn ask<T: serde::de::DeserializeOwned>(
    root_dir: &Path,
    path: &str,
) -> Result<T, serve::client::ClientError> {
    let socket = serve::socket_path(root_dir);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime
        .map_err(|source| serve::client::ClientError::Broken { socket: socket.clone(), source: source.into() })?;
    runtime.block_on(serve::client::get_json(&socket, path))
}

/// `rubelet check`.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    pub(crate) output: Output,
    /// The flags that the agent is started with
    #[arg(last = true, value_name = "KUBELET FLAGS")]
    pub(crate) flags: Vec<String>,
}

/// `rubelet pods`.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub(crate) struct PodsArgs {
    /// Only pods of this namespace
    #[arg(short, long)]
    pub(crate) namespace: Option<String>,
    #[command(flatten)]
    pub(crate) agent: Agent,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// `rubelet explain`.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub(crate) struct ExplainArgs {
    #[command(subcommand)]
    pub(crate) what: What,
}

/// What is explained.
#[derive(Clone, Debug, PartialEq, Eq, Subcommand)]
pub(crate) enum What {
    /// Why a pod does not run, or that it does; with its containers and its time line
    Pod {
        /// Its name, NAMESPACE/NAME, its UID, or the beginning of one of these
        name: String,
        /// Its namespace
        #[arg(short, long)]
        namespace: Option<String>,
        #[command(flatten)]
        agent: Agent,
        #[command(flatten)]
        output: Output,
    },
    /// Why the node is not ready, or that it is
    Node {
        #[command(flatten)]
        agent: Agent,
        #[command(flatten)]
        output: Output,
    },
}

/// Reads the command line; `argv` includes the program's name.
///
/// # Errors
/// A command line that is neither the agent's nor one of the commands.
pub(crate) fn parse(argv: &[String]) -> Result<Command, Usage> {
    let name = argv.first().and_then(|a| Path::new(a).file_name()).unwrap_or_default();
    let args = argv.get(1..).unwrap_or_default();
    let first = match args.first() {
        Some(first) if name != "kubelet" && !first.starts_with('-') => first.as_str(),
        _ => return Ok(Command::Agent(args.to_vec())),
    };
    let known: Vec<String> =
        Cli::command().get_subcommands().map(|c| c.get_name().to_owned()).chain(["help".to_owned()]).collect();
    if !known.iter().any(|k| k == first) {
        let near = known.iter().find(|k| strsim::jaro_winkler(k, first) > 0.8);
        let near = near.map_or_else(String::new, |k| format!(" (did you mean {k}?)"));
        return Err(Usage(format!(
            "rubelet: unknown command {first:?}{near}\nCommands: {}. Without a command, flags start the agent. See rubelet help.\n",
            known.join(", ")
        )));
    }
    let words = if first == "check" { check_words(args) } else { args.to_vec() };
    match Cli::try_parse_from(std::iter::once("rubelet".to_owned()).chain(words)) {
        Ok(Cli { command: Sub::Check(args) }) => Ok(Command::Check(args)),
        Ok(Cli { command: Sub::Pods(args) }) => Ok(Command::Pods(args)),
        Ok(Cli { command: Sub::Explain(args) }) => Ok(Command::Explain(args)),
        Ok(Cli { command: Sub::Version }) => Ok(Command::Version),
        Err(error) if error.kind() == ErrorKind::DisplayHelp => Ok(Command::Help(error.to_string())),
        Err(error) => Err(Usage(error.to_string())),
    }
}

/// `check --config F --json -v=2` → `check --json -- --config F -v=2`: its own options may stand anywhere among the kubelet's.
fn check_words(args: &[String]) -> Vec<String> {
    let (mut own, mut flags) = (args[..1].to_vec(), Vec::new());
    let mut rest = args[1..].iter();
    while let Some(word) = rest.next() {
        match word.as_str() {
            "--json" | "--help" | "-h" => own.push(word.clone()),
            "--color" => own.extend(std::iter::once(word).chain(rest.next()).cloned()),
            _ if word.starts_with("--color=") => own.push(word.clone()),
            "--" if flags.is_empty() => {}
            _ => flags.push(word.clone()),
        }
    }
    own.push("--".to_owned());
    own.extend(flags);
    own
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split_whitespace().map(str::to_owned).collect()
    }

    fn parsed(line: &str) -> Command {
        parse(&words(line)).unwrap_or_else(|e| panic!("{line}: {e:?}"))
    }

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_agent() {
        for line in [
            "rubelet",
            "/usr/bin/rubelet --config=/etc/k.yaml -v=2",
            "rubelet --help",
            "rubelet --version",
            "kubelet",
            "/usr/bin/kubelet --config /etc/k.yaml",
            "kubelet check --json",
            "/opt/kubelet pods",
        ] {
            assert_eq!(parsed(line), Command::Agent(words(line)[1..].to_vec()), "{line}");
        }
        assert_eq!(parse(&[]), Ok(Command::Agent(Vec::new())));
    }

    #[test]
    fn commands() {
        let agent = |dir: &str| Agent { root_dir: dir.into() };
        let json = Output { json: true, color: ColorChoice::Auto };
        let cases = [
            ("rubelet version", Command::Version),
            (
                "rubelet pods",
                Command::Pods(PodsArgs {
                    namespace: None,
                    agent: agent("/var/lib/kubelet"),
                    output: Output::default(),
                }),
            ),
            (
                "rubelet pods -n kube-system --json --root-dir /x",
                Command::Pods(PodsArgs { namespace: Some("kube-system".into()), agent: agent("/x"), output: json }),
            ),
            (
                "rubelet explain pod web -n default --color never",
                Command::Explain(ExplainArgs {
                    what: What::Pod {
                        name: "web".into(),
                        namespace: Some("default".into()),
                        agent: agent("/var/lib/kubelet"),
                        output: Output { json: false, color: ColorChoice::Never },
                    },
                }),
            ),
            (
                "rubelet explain node --json",
                Command::Explain(ExplainArgs { what: What::Node { agent: agent("/var/lib/kubelet"), output: json } }),
            ),
        ];
        for (line, command) in cases {
            assert_eq!(parsed(line), command, "{line}");
        }
    }

    #[test]
    fn check_takes_the_agents_flags_in_any_order() {
        for (line, json, color, flags) in [
            ("rubelet check", false, ColorChoice::Auto, ""),
            ("rubelet check --json", true, ColorChoice::Auto, ""),
            ("rubelet check --config f --json -v=2", true, ColorChoice::Auto, "--config f -v=2"),
            ("rubelet check --color always --root-dir=/x", false, ColorChoice::Always, "--root-dir=/x"),
            ("rubelet check --root-dir /x --color=never", false, ColorChoice::Never, "--root-dir /x"),
            ("rubelet check -- --config f", false, ColorChoice::Auto, "--config f"),
            ("rubelet check stray", false, ColorChoice::Auto, "stray"),
        ] {
            let wanted = CheckArgs { output: Output { json, color }, flags: words(flags) };
            assert_eq!(parsed(line), Command::Check(wanted), "{line}");
        }
    }

    #[test]
    fn help() {
        for (line, text) in [
            ("rubelet help", "Is this host fit"),
            ("rubelet help explain", "Why the node is not ready"),
            ("rubelet check --help", "KUBELET FLAGS"),
            ("rubelet check --config f -h", "Exit code: 0"),
            ("rubelet explain pod --help", "NAMESPACE/NAME"),
        ] {
            let Command::Help(shown) = parsed(line) else { panic!("{line}") };
            assert!(shown.contains(text), "{line}: {shown}");
        }
    }

    #[test]
    fn wrong_usage() {
        for (line, texts) in [
            ("rubelet podz", vec!["\"podz\"", "did you mean pods?", "check, pods, explain, version, help"]),
            ("rubelet xyz", vec!["unknown command \"xyz\"\nCommands"]),
            ("rubelet explain", vec!["pod", "node"]),
            ("rubelet explain pod", vec!["<NAME>"]),
            ("rubelet pods --color purple", vec!["always"]),
            ("rubelet pods --nope", vec!["--nope"]),
            ("rubelet check --color", vec!["--color"]),
        ] {
            let Err(Usage(shown)) = parse(&words(line)) else { panic!("{line}") };
            for text in texts {
                assert!(shown.contains(text), "{line}: {shown}");
            }
        }
    }
}
