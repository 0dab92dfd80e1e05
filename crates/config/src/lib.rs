//! The kubelet's configuration: flags, configuration file, drop-in files, feature gates; checked as Kubernetes 1.36
//! checks them, and every finding named.
//!
//! [`parse_flags`] reads the command line, [`load`] the rest. Neither stops at the first problem: [`Loaded`] carries
//! findings, and the caller decides. Only [`load::HostFiles`] touches the file system.

pub mod duration;
mod field;
mod flags;
mod gates;
mod labels;
pub mod load;
pub mod nested;
mod problem;
#[cfg(test)]
mod reference;
pub mod support;
mod tree;
mod types;
mod validate;

pub use flags::{FlagError, FlagProblem, Flags, VersionRequest, parse_bool, parse_flags};
pub use gates::{Gate, Gates, Stage};
pub use load::{Files, Host, HostFiles, Loaded, load};
pub use nested::*;
pub use problem::ConfigFinding;
pub use types::{API_VERSION, DEFAULT_EVICTION_HARD, KIND, KubeletConfiguration, port_number};

/// The effective configuration as `/configz` shows it under `kubeletconfig`: field order of the API, empty fields left
/// out as Kubernetes leaves them out.
#[must_use]
pub fn configz(config: &KubeletConfiguration) -> serde_json::Value {
    let mut map = serde_json::Map::new();
    map.insert("kind".to_owned(), KIND.into());
    map.insert("apiVersion".to_owned(), API_VERSION.into());
    if let serde_json::Value::Object(fields) = field::Field::write(config) {
        map.extend(fields);
    }
    serde_json::Value::Object(map)
}
