//! The command line: every flag of the kubelet, read as `pflag` does.
//!
//! `--flag=value`, `--flag value`, `--flag` for booleans, `-v=2`, `-v 2`, `-v2`; `_` in a name counts as `-`; `--` ends
//! the flags. Lists and maps add up over repeated flags. A flag of the configuration is applied after the files.

mod help;
mod removed;
mod shown;
mod table;
mod value;

pub use value::parse_bool;

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use crate::duration;
use crate::labels;
use crate::problem::Problem;
use removed::REMOVED;
use table::{FLAGS, Kind, Spec, Target};

/// One thing that is wrong with the command line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FlagProblem {
    /// No such flag.
    #[error("failed to parse kubelet flag: unknown flag: --{0}")]
    Unknown(String),
    /// No such one-letter flag.
    #[error("failed to parse kubelet flag: unknown shorthand flag: '{letter}' in -{rest}")]
    UnknownShorthand {
        /// The letter.
        letter: char,
        /// It and what follows it.
        rest: String,
    },
    /// The flag existed once.
    #[error("failed to parse kubelet flag: unknown flag: --{name}: {remedy}")]
    Removed {
        /// Its name.
        name: &'static str,
        /// Since when, and what to do instead.
        remedy: &'static str,
    },
    /// The last argument is a flag that needs a value.
    #[error("failed to parse kubelet flag: flag needs an argument: {0}")]
    NeedsArgument(String),
    /// The value does not fit the flag.
    #[error("failed to parse kubelet flag: invalid argument {} for \"{flag}\" flag: {reason}", duration::quote(.value))]
    Invalid {
        /// The flag, with its short form if it has one.
        flag: String,
        /// The value.
        value: String,
        /// Why not.
        reason: String,
    },
    /// `--=x`, `---x`.
    #[error("failed to parse kubelet flag: bad flag syntax: {0}")]
    Syntax(String),
    /// An argument that is no flag.
    #[error("unknown command {0}")]
    Command(String),
}

/// The command line cannot be used; all that is wrong with it, one a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlagError {
    /// In the order found; never empty.
    pub problems: Vec<FlagProblem>,
}

impl fmt::Display for FlagError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, problem) in self.problems.iter().enumerate() {
            let separator = if i == 0 { "" } else { "\n" };
            write!(f, "{separator}{problem}")?;
        }
        Ok(())
    }
}

impl std::error::Error for FlagError {}

/// What `--version` asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VersionRequest {
    /// `--version`: print `Kubernetes vX.Y.Z` and exit.
    Plain,
    /// `--version=raw`: print the build's details and exit.
    Raw,
    /// `--version=vX.Y.Z…`: run, and report this version.
    Report(String),
}

/// The flags given.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Flags {
    /// Values by flag name, as the configuration API would write them.
    set: BTreeMap<&'static str, Value>,
    warnings: Vec<String>,
}

fn find(name: &str) -> Option<&'static Spec> {
    FLAGS.iter().find(|spec| spec.name == name)
}

/// Parses the arguments after the program's name.
///
/// # Errors
/// Every unknown, removed or malformed flag and every argument that is no flag. After a flag whose shape is not known
/// (`--foo x`), reading stops: the next word may be its value.
pub fn parse_flags(args: &[String]) -> Result<Flags, FlagError> {
    let mut parser = Parser { args: args.iter(), flags: Flags::default(), problems: Vec::new(), commands: Vec::new() };
    parser.run();
    let mut problems = parser.problems;
    if problems.is_empty() {
        problems.extend(parser.commands.into_iter().map(FlagProblem::Command));
    }
    if problems.is_empty() { Ok(parser.flags) } else { Err(FlagError { problems }) }
}

struct Parser<'a> {
    args: std::slice::Iter<'a, String>,
    flags: Flags,
    problems: Vec<FlagProblem>,
    commands: Vec<String>,
}

impl Parser<'_> {
    fn run(&mut self) {
        while let Some(arg) = self.args.next() {
            let go_on = if arg == "--" {
                self.commands.extend(self.args.by_ref().cloned());
                return;
            } else if let Some(long) = arg.strip_prefix("--") {
                self.long(arg, long)
            } else if let Some(short) = arg.strip_prefix('-').filter(|s| !s.is_empty()) {
                self.short(short)
            } else {
                self.commands.push(arg.clone());
                true
            };
            if !go_on {
                return;
            }
        }
    }

    /// `--name`, `--name=value`, `--name value`. False: what follows cannot be understood.
    fn long(&mut self, arg: &str, long: &str) -> bool {
        let (name, inline) = match long.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (long, None),
        };
        if name.is_empty() || name.starts_with('-') {
            self.problems.push(FlagProblem::Syntax(arg.to_owned()));
            return true;
        }
        let name = name.replace('_', "-");
        if let Some(spec) = find(&name) {
            let value = inline.or_else(|| value::without_value(spec.kind));
            let next = || self.args.next().map(String::as_str);
            match value.or_else(next) {
                Some(value) => self.set(spec, value),
                None => self.problems.push(FlagProblem::NeedsArgument(format!("--{name}"))),
            }
            return true;
        }
        if let Some(gone) = REMOVED.iter().find(|gone| gone.name == name) {
            self.problems.push(FlagProblem::Removed { name: gone.name, remedy: gone.remedy });
            if inline.is_none() && !gone.boolean {
                self.args.next();
            }
            return true;
        }
        self.problems.push(FlagProblem::Unknown(name));
        inline.is_some()
    }

    /// `-h`, `-v2`, `-v=2`, `-v 2`, `-hv2`.
    fn short(&mut self, letters: &str) -> bool {
        let mut rest = letters;
        while let Some(letter) = rest.chars().next() {
            let Some(spec) = FLAGS.iter().find(|s| s.shorthand() == Some(letter)) else {
                self.problems.push(FlagProblem::UnknownShorthand { letter, rest: rest.to_owned() });
                return false;
            };
            let after = &rest[letter.len_utf8()..];
            if let Some(value) = after.strip_prefix('=').filter(|v| !v.is_empty()) {
                self.set(spec, value);
                return true;
            }
            if let Some(value) = value::without_value(spec.kind) {
                self.set(spec, value);
                rest = after;
                continue;
            }
            let next = || self.args.next().map(String::as_str);
            match Some(after).filter(|a| !a.is_empty()).or_else(next) {
                Some(value) => self.set(spec, value),
                None => self.problems.push(FlagProblem::NeedsArgument(format!("'{letter}' in -{rest}"))),
            }
            return true;
        }
        true
    }

    fn set(&mut self, spec: &'static Spec, text: &str) {
        match value::parse(spec.kind, text, self.flags.set.get(spec.name)) {
            Ok(value) => {
                if let Some(value) = value {
                    self.flags.set.insert(spec.name, value);
                }
                if let Some(message) = spec.deprecated.message() {
                    let name = spec.name;
                    let text = format!("Flag --{name} has been deprecated, {message}");
                    self.flags.warnings.push(text);
                }
            }
            Err(reason) => {
                let long = format!("--{}", spec.name);
                let flag = match spec.shorthand() {
                    Some(letter) => format!("-{letter}, {long}"),
                    None => long,
                };
                self.problems.push(FlagProblem::Invalid { flag, value: text.to_owned(), reason });
            }
        }
    }
}

impl Flags {
    /// The value of a flag of the process itself, or its default.
    fn own(&self, name: &str) -> &str {
        let given = self.set.get(name).and_then(Value::as_str);
        let default = || match find(name).map(|spec| spec.target) {
            Some(Target::Own(default)) => default,
            _ => "",
        };
        given.unwrap_or_else(default)
    }

    fn own_path(&self, name: &str) -> Option<PathBuf> {
        Some(self.own(name)).filter(|v| !v.is_empty()).map(PathBuf::from)
    }

    fn own_bool(&self, name: &str) -> bool {
        self.set.get(name).and_then(Value::as_bool).unwrap_or(false)
    }

    /// Was the flag given? By its name without dashes in front.
    #[must_use]
    pub fn is_set(&self, name: &str) -> bool {
        self.set.contains_key(name)
    }

    /// Was the flag given without effect: empty, false?
    pub(crate) fn is_blank(&self, name: &str) -> bool {
        match self.set.get(name) {
            None | Some(Value::Null | Value::Bool(false)) => true,
            Some(Value::String(text)) => text.is_empty(),
            Some(_) => false,
        }
    }

    /// Names of all flags given, in order of name.
    pub fn names(&self) -> impl Iterator<Item = &'static str> + '_ {
        self.set.keys().copied()
    }

    /// One line for each use of a deprecated flag, as Kubernetes prints them.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// `--help`.
    #[must_use]
    pub fn help(&self) -> bool {
        self.own_bool("help")
    }

    /// `--version`.
    #[must_use]
    pub fn version(&self) -> Option<VersionRequest> {
        Some(match self.set.get("version")?.as_str()? {
            "true" => VersionRequest::Plain,
            "raw" => VersionRequest::Raw,
            other => VersionRequest::Report(other.to_owned()),
        })
    }

    /// `--config`: the configuration file.
    #[must_use]
    pub fn config(&self) -> Option<PathBuf> {
        self.own_path("config")
    }

    /// `--config-dir`: the directory of drop-in files.
    #[must_use]
    pub fn config_dir(&self) -> Option<PathBuf> {
        self.own_path("config-dir")
    }

    /// `--root-dir`: the kubelet's own directory.
    #[must_use]
    pub fn root_dir(&self) -> &Path {
        Path::new(self.own("root-dir"))
    }

    /// `--cert-dir`: where certificates are kept.
    #[must_use]
    pub fn cert_dir(&self) -> &Path {
        Path::new(self.own("cert-dir"))
    }

    /// `--kubeconfig`: how to reach the API server; none: standalone.
    #[must_use]
    pub fn kubeconfig(&self) -> Option<PathBuf> {
        self.own_path("kubeconfig")
    }

    /// `--bootstrap-kubeconfig`.
    #[must_use]
    pub fn bootstrap_kubeconfig(&self) -> Option<PathBuf> {
        self.own_path("bootstrap-kubeconfig")
    }

    /// `--hostname-override`: the node's name; none: the host's.
    #[must_use]
    pub fn hostname_override(&self) -> Option<&str> {
        Some(self.own("hostname-override")).filter(|v| !v.is_empty())
    }

    /// `--node-ip`: one address, or one of each family, comma-separated; none: found out.
    #[must_use]
    pub fn node_ip(&self) -> Option<&str> {
        Some(self.own("node-ip")).filter(|v| !v.is_empty())
    }

    /// The addresses of `--node-ip`; entries that are none are left out, as Kubernetes does.
    #[must_use]
    pub fn node_ips(&self) -> Vec<IpAddr> {
        self.own("node-ip").split(',').filter_map(|ip| ip.trim().parse().ok()).collect()
    }

    fn check_node_ips(&self) -> Option<Problem> {
        let ips = self.node_ips();
        let given = self.own("node-ip");
        let why = match ips[..] {
            [] | [_] => None,
            [a, b] if a.is_ipv4() != b.is_ipv4() => (a.is_unspecified() || b.is_unspecified())
                .then_some("dual-stack node IP cannot include '0.0.0.0' or '::'"),
            _ => Some("must contain either a single IP or a dual-stack pair of IPs"),
        };
        if let Some(why) = why {
            let given = duration::quote(given);
            return Some(Problem::error("--node-ip", format!("bad --node-ip {given}: {why}")));
        }
        let wrong = given.split(',').filter(|ip| !given.is_empty() && ip.trim().parse::<IpAddr>().is_err());
        let wrong: Vec<_> = wrong.collect();
        (!wrong.is_empty()).then(|| {
            let text = format!("Could not parse some node IP(s), ignoring them IPs={wrong:?}");
            Problem::warning("--node-ip", text)
        })
    }

    /// `--node-labels`.
    #[must_use]
    pub fn node_labels(&self) -> BTreeMap<String, String> {
        self.label_pairs().map(|(k, v)| (k.to_owned(), v.to_owned())).collect()
    }

    fn label_pairs(&self) -> impl Iterator<Item = (&str, &str)> + Clone {
        let map = self.set.get("node-labels").and_then(Value::as_object);
        map.into_iter().flatten().map(|(k, v)| (k.as_str(), v.as_str().unwrap_or_default()))
    }

    /// `--cloud-provider`: `external` or empty.
    #[must_use]
    pub fn cloud_provider(&self) -> &str {
        self.own("cloud-provider")
    }

    /// `--runtime-cgroups`: the runtime's cgroup; none: found out.
    #[must_use]
    pub fn runtime_cgroups(&self) -> Option<&str> {
        Some(self.own("runtime-cgroups")).filter(|v| !v.is_empty())
    }

    /// `--seccomp-default`; on if this or the configuration's `seccompDefault` is.
    #[must_use]
    pub fn seccomp_default(&self) -> bool {
        self.own_bool("seccomp-default")
    }

    /// `--image-credential-provider-config`.
    #[must_use]
    pub fn image_credential_provider_config(&self) -> Option<PathBuf> {
        self.own_path("image-credential-provider-config")
    }

    /// `--image-credential-provider-bin-dir`.
    #[must_use]
    pub fn image_credential_provider_bin_dir(&self) -> Option<PathBuf> {
        self.own_path("image-credential-provider-bin-dir")
    }

    /// `--lock-file`.
    #[must_use]
    pub fn lock_file(&self) -> Option<PathBuf> {
        self.own_path("lock-file")
    }

    /// `--exit-on-lock-contention`.
    #[must_use]
    pub fn exit_on_lock_contention(&self) -> bool {
        self.own_bool("exit-on-lock-contention")
    }

    /// `--experimental-allocatable-ignore-eviction`: hard thresholds are not subtracted from allocatable.
    #[must_use]
    pub fn allocatable_ignores_eviction(&self) -> bool {
        self.own_bool("experimental-allocatable-ignore-eviction")
    }

    /// `--housekeeping-interval`: how often container statistics are read.
    #[must_use]
    pub fn housekeeping_interval(&self) -> Duration {
        duration::parse(self.own("housekeeping-interval")).unwrap_or(Duration::from_secs(10))
    }

    /// `--minimum-container-ttl-duration`: youngest age at which a dead container may go.
    #[must_use]
    pub fn minimum_container_ttl(&self) -> Duration {
        duration::parse(self.own("minimum-container-ttl-duration")).unwrap_or_default()
    }

    /// `--maximum-dead-containers-per-container`: dead ones kept for each container.
    #[must_use]
    pub fn maximum_dead_containers_per_container(&self) -> i32 {
        self.own_i32("maximum-dead-containers-per-container", 1)
    }

    /// `--maximum-dead-containers`: dead ones kept on the node; negative: any number.
    #[must_use]
    pub fn maximum_dead_containers(&self) -> i32 {
        self.own_i32("maximum-dead-containers", -1)
    }

    fn own_i32(&self, name: &str, default: i32) -> i32 {
        let given = self.set.get(name).and_then(Value::as_i64);
        given.and_then(|v| i32::try_from(v).ok()).unwrap_or(default)
    }

    /// `-v`, if given; the effective one is `config.logging.verbosity`.
    #[must_use]
    pub fn verbosity(&self) -> Option<u32> {
        let given = self.set.get("v").and_then(Value::as_u64)?;
        u32::try_from(given).ok()
    }

    /// `--container-runtime-endpoint`, if given; the effective one is in the configuration.
    #[must_use]
    pub fn container_runtime_endpoint(&self) -> Option<&str> {
        self.set.get("container-runtime-endpoint")?.as_str()
    }

    /// Flags of the configuration that were given: name, field path, value, and whether the value adds to the file's.
    pub(crate) fn fields(&self) -> impl Iterator<Item = (&'static str, &'static str, &Value, bool)> {
        self.set.iter().filter_map(|(name, value)| {
            let spec = find(name)?;
            match spec.target {
                Target::Field(field) => Some((*name, field, value, spec.kind == Kind::Vmodule)),
                Target::Own(_) => None,
            }
        })
    }

    /// `--feature-gates`.
    pub(crate) fn feature_gates(&self) -> BTreeMap<String, bool> {
        let map = self.set.get("feature-gates").and_then(Value::as_object);
        map.into_iter().flatten().filter_map(|(k, v)| Some((k.clone(), v.as_bool()?))).collect()
    }

    /// What is wrong with flags whose text was well formed.
    pub(crate) fn validate(&self, out: &mut Vec<Problem>) {
        if let Some(message) = labels::node_labels(self.label_pairs()) {
            out.push(Problem::error("--node-labels", format!("failed to validate kubelet flags: {message}")));
        }
        out.extend(self.check_node_ips());
        if self.exit_on_lock_contention() && self.lock_file().is_none() {
            out.push(Problem::error(
                "--exit-on-lock-contention",
                "cannot exit on lock file contention: no lock file specified",
            ));
        }
        if !["", "external"].contains(&self.cloud_provider()) {
            let given = duration::quote(self.cloud_provider());
            out.push(Problem::error(
                "--cloud-provider",
                format!("{given}: in-tree cloud providers are gone; only \"external\" or nothing can be given"),
            ));
        }
    }

    /// The text of `--help`.
    #[must_use]
    pub fn help_text() -> String {
        help::text()
    }
}

/// Name, type, default and deprecation of every flag, for comparison with Kubernetes' own list.
#[cfg(test)]
pub(crate) fn listing() -> Vec<(&'static str, &'static str, String, bool)> {
    FLAGS.iter().map(|s| (s.name, s.kind.name(), help::default(s), s.deprecated != table::Deprecated::Never)).collect()
}
