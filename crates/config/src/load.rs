//! From flags and files to the effective configuration.
//!
//! Order: defaults, `--config`, each `*.conf` below `--config-dir` in order of name (JSON merge patch: mappings merge,
//! lists and scalars replace, null goes back to the default), then flags over all. A drop-in is merged over the file
//! with its defaults filled in, as Kubernetes does it.

use std::io;
use std::path::{Component, Path, PathBuf};

use model::report::Severity;
use serde_json::Value;

use crate::field::Field as _;
use crate::flags::Flags;
use crate::gates::{Gate, Gates};
use crate::nested::{AuthorizationMode, ImagePullCredentialsVerificationPolicy};
use crate::problem::{ConfigFinding, Problem};
use crate::support;
use crate::tree::{self, merge_patch};
use crate::types::{API_VERSION, DEFAULT_EVICTION_HARD, KIND, KubeletConfiguration};
use crate::validate;

/// What a directory holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirEntry {
    /// Base name.
    pub name: String,
    /// A directory (a link to one is not).
    pub is_dir: bool,
}

/// The files that configuration is read from.
pub trait Files {
    /// The content of a file.
    ///
    /// # Errors
    /// As the system says.
    fn read(&self, path: &Path) -> io::Result<Vec<u8>>;
    /// The entries of a directory, in any order.
    ///
    /// # Errors
    /// As the system says; `NotADirectory` for a file.
    fn list(&self, path: &Path) -> io::Result<Vec<DirEntry>>;
}

/// The file system of this host.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostFiles;

impl Files for HostFiles {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        std::fs::read(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<DirEntry>> {
        std::fs::read_dir(path)?
            .map(|entry| {
                let entry = entry?;
                Ok(DirEntry {
                    name: entry.file_name().to_string_lossy().into_owned(),
                    is_dir: entry.file_type()?.is_dir(),
                })
            })
            .collect()
    }
}

/// What must be known of this host to judge a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// cgroup v2 alone is mounted at /sys/fs/cgroup.
    pub cgroup_v2: bool,
    /// Relative paths of flags start here.
    pub working_dir: PathBuf,
}

/// The effective configuration and all that was found on the way to it.
#[derive(Clone, Debug, PartialEq)]
pub struct Loaded {
    /// The configuration; fields that were wrong have their default.
    pub config: KubeletConfiguration,
    /// The feature gates.
    pub gates: Gates,
    /// In the order: flags, files, gates, validation, support.
    pub findings: Vec<ConfigFinding>,
}

impl Loaded {
    /// True when a finding forbids the start.
    #[must_use]
    pub fn has_errors(&self) -> bool {
        self.findings.iter().any(|f| f.severity >= Severity::Error)
    }
}

/// Loads the configuration that `flags` name. Never stops at a problem.
#[must_use]
pub fn load(flags: &Flags, files: &dyn Files, host: &Host) -> Loaded {
    let mut loader = Loader { flags, files, host, findings: Vec::new(), unread: false };
    let (config, gates) = loader.run();
    Loaded { config, gates, findings: loader.findings }
}

struct Loader<'a> {
    flags: &'a Flags,
    files: &'a dyn Files,
    host: &'a Host,
    findings: Vec<ConfigFinding>,
    /// The configuration file could not be read at all: its values are not known, so nothing is said about them.
    unread: bool,
}

impl Loader<'_> {
    fn keep(&mut self, problems: Vec<Problem>, file: Option<&Path>) {
        let found = problems.into_iter().map(|p| p.found_in(file.map(Path::to_owned)));
        self.findings.extend(found);
    }

    fn fail(&mut self, file: &Path, path: &str, message: String) {
        self.keep(vec![Problem::error(path, message)], Some(file));
    }

    fn run(&mut self) -> (KubeletConfiguration, Gates) {
        let mut problems = Vec::new();
        for text in self.flags.warnings() {
            problems.push(Problem::warning("", text.as_str()));
        }
        self.flags.validate(&mut problems);
        self.keep(problems, None);

        let file = self.flags.config();
        let dir = self.flags.config_dir();
        let mut config = match &file {
            Some(file) => self.file(&self.absolute(file)),
            None => {
                self.no_file();
                let mut config = KubeletConfiguration::without_file();
                let gates = self.gates_so_far(&config);
                gate_defaults(&mut config, &gates);
                // With a drop-in directory alone the flags are below the drop-ins too, and once more above them.
                self.apply_flags(&mut config, &mut Vec::new());
                config
            }
        };
        if let Some(dir) = &dir {
            self.drop_ins(&mut config, dir);
        }
        let mut problems = Vec::new();
        self.apply_flags(&mut config, &mut problems);
        self.keep(problems, None);

        let mut problems = Vec::new();
        let gates = Gates::with(&config.feature_gates, "featureGates", &mut problems);
        if !self.unread {
            validate::validate(&config, &gates, self.host, &mut problems);
            validate::standalone(&config, self.flags, &mut problems);
            support::check(&config, &gates, &mut problems);
        }
        support::check_flags(self.flags, &mut problems);
        self.keep(problems, None);
        (config, gates)
    }

    fn absolute(&self, path: &Path) -> PathBuf {
        clean(&self.host.working_dir.join(path))
    }

    /// Gates for conditional defaults; their problems are told once, at the end.
    fn gates_so_far(&self, config: &KubeletConfiguration) -> Gates {
        let mut set = config.feature_gates.clone();
        set.extend(self.flags.feature_gates());
        Gates::with(&set, "", &mut Vec::new())
    }

    fn no_file(&mut self) {
        let open = !self.flags.is_set("anonymous-auth")
            || !self.flags.is_set("authorization-mode")
            || !self.flags.is_set("read-only-port");
        if open && self.flags.config_dir().is_none() {
            let text = "no --config: the defaults of the old command line hold (anonymousAuth true, authorization AlwaysAllow, readOnlyPort 10255, no hard eviction thresholds); a configuration file has safe ones";
            self.keep(vec![Problem::warning("--config", text)], None);
        }
    }

    fn apply_flags(&self, config: &mut KubeletConfiguration, out: &mut Vec<Problem>) {
        for (name, path, value, adds) in self.flags.fields() {
            let flag = format!("--{name}");
            if path == "featureGates" {
                config.feature_gates.extend(self.flags.feature_gates());
            } else if adds {
                let before = config.logging.vmodule.clone();
                let keys: Vec<_> = path.split('.').collect();
                config.set(&keys, value, &flag, out);
                config.logging.vmodule.splice(0..0, before);
            } else {
                let keys: Vec<_> = path.split('.').collect();
                config.set(&keys, value, &flag, out);
            }
        }
    }

    /// Reads a file up to its value tree; apiVersion and kind are checked and taken out.
    fn tree(&mut self, file: &Path, what: &str, duplicate: Severity) -> Option<Value> {
        let data = match self.files.read(file) {
            Ok(data) => data,
            Err(e) => {
                let name = file.display();
                self.fail(file, "", format!("failed to read {what} \"{name}\", error: {e}"));
                return None;
            }
        };
        if data.is_empty() {
            let name = file.display();
            self.fail(file, "", format!("kubelet config file \"{name}\" was empty"));
            return None;
        }
        let parsed = match tree::parse(&data) {
            Ok(parsed) => parsed,
            Err(e) => {
                self.fail(file, "", format!("failed to decode: {e}"));
                return None;
            }
        };
        let mut problems: Vec<_> = parsed
            .duplicates
            .iter()
            .map(|path| Problem {
                severity: duplicate,
                path: path.clone(),
                message: format!("duplicate field \"{path}\": the last one counts"),
            })
            .collect();
        if parsed.documents > 1 {
            let count = parsed.documents;
            let text = format!("the file holds {count} YAML documents; only the first one counts");
            problems.push(Problem::warning("", text));
        }
        self.keep(problems, Some(file));
        let mut value = parsed.value;
        if value.is_null() {
            value = Value::Object(serde_json::Map::new());
        }
        let Some(map) = value.as_object_mut() else {
            let message = "failed to decode: a mapping with apiVersion, kind and fields is needed";
            self.fail(file, "", message.to_owned());
            return None;
        };
        let api_version = map.shift_remove("apiVersion");
        let kind = map.shift_remove("kind");
        if let Some(message) = type_error(api_version.as_ref(), kind.as_ref()) {
            self.fail(file, "", message);
            return None;
        }
        // logging.flushFrequency alone may be a number: nanoseconds.
        if let Some(flush) = value.pointer_mut("/logging/flushFrequency")
            && let Some(nanos) = flush.as_i64()
        {
            let text = crate::duration::format_signed(jiff::SignedDuration::from_nanos(nanos));
            *flush = text.into();
        }
        Some(value)
    }

    fn file(&mut self, file: &Path) -> KubeletConfiguration {
        let tree = self.tree(file, "kubelet config file", Severity::Warning);
        self.unread = tree.is_none();
        let tree = tree.unwrap_or_else(|| Value::Object(serde_json::Map::new()));
        let mut problems = Vec::new();
        let mut config = KubeletConfiguration::read(&tree, "", &mut problems).unwrap_or_default();
        self.keep(problems, Some(file));
        linked_defaults(&mut config, &tree);
        let gates = self.gates_so_far(&config);
        gate_defaults(&mut config, &gates);
        default_eviction(&mut config, &tree);
        if let Some(parent) = file.parent() {
            resolve_paths(&mut config, parent);
        }
        config
    }

    fn drop_ins(&mut self, config: &mut KubeletConfiguration, dir: &Path) {
        let dir = self.absolute(dir);
        let mut paths = Vec::new();
        let listed = self.walk(&dir, &mut paths);
        if let Err((path, e)) = listed {
            let message = format!("failed to walk through kubelet dropin directory \"{}\": {e}", dir.display());
            self.fail(&path, "", message);
        }
        if paths.is_empty() {
            return;
        }
        let mut merged = config.write();
        for path in &paths {
            let tree = self.tree(path, "drop-in kubelet config file", Severity::Error);
            let Some(tree) = tree else { continue };
            let mut problems = Vec::new();
            KubeletConfiguration::read(&tree, "", &mut problems);
            self.keep(problems, Some(path));
            merge_patch(&mut merged, &tree);
        }
        // What is wrong was said above, with its file.
        if let Some(read) = KubeletConfiguration::read(&merged, "", &mut Vec::new()) {
            *config = read;
        }
        linked_defaults(config, &merged);
        let gates = self.gates_so_far(config);
        gate_defaults(config, &gates);
    }

    /// Files `*.conf` below a directory, each directory's entries in order of name.
    fn walk(&self, dir: &Path, out: &mut Vec<PathBuf>) -> Result<(), (PathBuf, io::Error)> {
        let mut entries = match self.files.list(dir) {
            Ok(entries) => entries,
            // A file in place of the directory has no entries.
            Err(e) if e.kind() == io::ErrorKind::NotADirectory => return Ok(()),
            Err(e) => return Err((dir.to_owned(), e)),
        };
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        for entry in entries {
            let path = dir.join(&entry.name);
            if entry.is_dir {
                self.walk(&path, out)?;
            } else if entry.name.ends_with(".conf") {
                out.push(path);
            }
        }
        Ok(())
    }
}

fn type_error(api_version: Option<&Value>, kind: Option<&Value>) -> Option<String> {
    let text = |value: Option<&Value>| value.and_then(Value::as_str).unwrap_or_default().to_owned();
    let (api_version, kind) = (text(api_version), text(kind));
    let needed = format!("\"apiVersion: {API_VERSION}\" and \"kind: {KIND}\" are needed");
    if kind.is_empty() {
        Some(format!("failed to decode: Object 'Kind' is missing: {needed}"))
    } else if api_version.is_empty() {
        Some(format!("failed to decode: Object 'apiVersion' is missing: {needed}"))
    } else if api_version != API_VERSION || kind != KIND {
        Some(format!("failed to decode: no kind \"{kind}\" is registered for version \"{api_version}\": {needed}"))
    } else {
        None
    }
}

/// Was the field given a value? `tree` is what the configuration was read from.
fn given(tree: &Value, field: &str) -> bool {
    tree.get(field).is_some_and(|value| !value.is_null())
}

fn linked_defaults(config: &mut KubeletConfiguration, tree: &Value) {
    let set = |field: &str| given(tree, field) && tree[field] != "0s";
    if !set("nodeStatusReportFrequency") && set("nodeStatusUpdateFrequency") {
        config.node_status_report_frequency = config.node_status_update_frequency;
    }
    if !given(tree, "serializeImagePulls") {
        config.serialize_image_pulls = config.max_parallel_image_pulls.is_none_or(|n| n < 2);
    }
    if config.pod_pids_limit < 0 {
        config.pod_pids_limit = -1;
    }
}

fn gate_defaults(config: &mut KubeletConfiguration, gates: &Gates) {
    if gates.enabled(Gate::KubeletCrashLoopBackOffMax) {
        let cap = &mut config.crash_loop_back_off.max_container_restart_period;
        cap.get_or_insert(std::time::Duration::from_mins(5));
    }
    if gates.enabled(Gate::KubeletEnsureSecretPulledImages) {
        let policy = &mut config.image_pull_credentials_verification_policy;
        policy.get_or_insert(ImagePullCredentialsVerificationPolicy::NeverVerifyPreloadedImages);
    }
}

fn default_eviction(config: &mut KubeletConfiguration, tree: &Value) {
    let defaults = DEFAULT_EVICTION_HARD.iter().map(|&(signal, value)| (signal.to_owned(), value.to_owned()));
    if !given(tree, "evictionHard") {
        config.eviction_hard = defaults.collect();
    } else if config.merge_default_eviction_settings {
        for (signal, value) in defaults {
            config.eviction_hard.entry(signal).or_insert(value);
        }
    }
}

/// Relative paths in a file start at the file's directory.
fn resolve_paths(config: &mut KubeletConfiguration, dir: &Path) {
    for path in [
        &mut config.static_pod_path,
        &mut config.authentication.x509.client_ca_file,
        &mut config.tls_cert_file,
        &mut config.tls_private_key_file,
        &mut config.resolv_conf,
        &mut config.volume_plugin_dir,
        &mut config.pod_logs_dir,
    ] {
        if !path.is_empty() && !path.starts_with('/') {
            *path = clean(&dir.join(path.as_str())).display().to_string();
        }
    }
}

/// The shortest spelling of a path, by its text alone.
fn clean(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => {
                let above = matches!(out.components().next_back(), Some(Component::Normal(_)));
                if above {
                    out.pop();
                } else if !out.has_root() {
                    out.push("..");
                }
            }
            other => out.push(other),
        }
    }
    out
}

/// Does this configuration need an API server to judge callers?
pub(crate) fn asks_api_server(config: &KubeletConfiguration) -> (bool, bool) {
    (config.authentication.webhook.enabled, config.authorization.mode == AuthorizationMode::Webhook)
}
