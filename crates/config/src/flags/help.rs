//! The text of `--help`: each flag with its type, what it sets and its default.

use std::fmt::Write as _;

use serde_json::Value;

use super::table::{Deprecated, FLAGS, Kind, Spec, Target};
use crate::field::Field as _;
use crate::types::KubeletConfiguration;

const HEAD: &str = "rubelet is a node agent for Kubernetes: it takes the pods of this node (from an API server, a directory or a URL) and
keeps their containers running through the container runtime. It takes the kubelet's flags and configuration.

Usage:
  rubelet [flags]

Flags:
";

/// What a flag that is not a configuration field is for.
fn purpose(name: &str) -> &'static str {
    match name {
        "bootstrap-kubeconfig" => "kubeconfig file used to get the first client certificate",
        "cert-dir" => "directory of certificates",
        "cloud-provider" => "\"external\": a cloud controller manager completes the node",
        "config" => "configuration file (KubeletConfiguration)",
        "config-dir" => "directory of *.conf drop-in files, merged over --config in order of name",
        "exit-on-lock-contention" => "exit when another process opens the lock file",
        "help" => "this text",
        "hostname-override" => "name of the node instead of the host's",
        "housekeeping-interval" => "how often container statistics are read",
        "image-credential-provider-bin-dir" => "directory of credential provider plugins",
        "image-credential-provider-config" => "configuration of credential provider plugins",
        "kubeconfig" => "kubeconfig file of the API server; without it the node is standalone",
        "lock-file" => "file to lock while running",
        "maximum-dead-containers" => "dead containers kept on the node; negative: any number",
        "maximum-dead-containers-per-container" => "dead containers kept for each container",
        "minimum-container-ttl-duration" => "youngest age at which a dead container is removed",
        "node-ip" => "address of the node, or one of each family, comma-separated",
        "node-labels" => "labels that the node registers with",
        "root-dir" => "directory of the kubelet's own files",
        "runtime-cgroups" => "cgroup of the container runtime",
        "seccomp-default" => "seccomp profile RuntimeDefault where a pod names none",
        "version" => "print the version; raw: with details; vX.Y.Z: report this version",
        "experimental-allocatable-ignore-eviction" => "do not subtract hard eviction thresholds from allocatable",
        _ => "accepted, without effect",
    }
}

fn shown(value: &Value) -> String {
    match value {
        Value::Null | Value::Bool(false) => String::new(),
        Value::Number(n) if n.as_f64() == Some(0.0) => String::new(),
        Value::String(s) if s.is_empty() || s == "0s" || s == "0" => String::new(),
        Value::Array(items) if items.is_empty() => String::new(),
        Value::Object(_) => String::new(),
        Value::Array(items) => {
            let items: Vec<_> = items.iter().filter_map(Value::as_str).collect();
            format!("[{}]", items.join(" "))
        }
        Value::String(s) => s.clone(),
        other => other.to_string(),
    }
}

/// The default as `--help` shows it; empty for zero values.
pub(super) fn default(spec: &Spec) -> String {
    let text = match spec.target {
        Target::Own(text) => text.to_owned(),
        Target::Field(path) => {
            let config = KubeletConfiguration::without_file().write();
            let value = path.split('.').try_fold(&config, |v, key| v.get(key));
            value.map(shown).unwrap_or_default()
        }
    };
    if spec.kind == Kind::Text && !text.is_empty() { format!("\"{text}\"") } else { text }
}

pub(super) fn text() -> String {
    let heads: Vec<String> = FLAGS
        .iter()
        .map(|spec| {
            let short = spec.shorthand().map_or("    ".to_owned(), |letter| format!("-{letter}, "));
            format!("  {short}--{} {}", spec.name, spec.kind.name())
        })
        .collect();
    let width = heads.iter().map(String::len).max().unwrap_or(0) + 2;
    let mut out = HEAD.to_owned();
    for (spec, head) in FLAGS.iter().zip(heads) {
        let what = match spec.target {
            Target::Field(path) => format!("sets {path}"),
            Target::Own(_) => purpose(spec.name).to_owned(),
        };
        let default = match default(spec) {
            d if d.is_empty() => d,
            d => format!(" (default {d})"),
        };
        let note = match spec.deprecated {
            Deprecated::Never => "",
            Deprecated::Config => " (DEPRECATED: set it in the configuration file)",
            _ => " (DEPRECATED)",
        };
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{head:width$}{what}{default}{note}");
    }
    out
}
