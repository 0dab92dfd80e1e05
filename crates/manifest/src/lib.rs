//! Static pods: from the bytes of a file or an HTTP answer to pods that can run, as the Go kubelet makes them.
//!
//! The steps are those of Kubernetes 1.36, in its order: decode ([`decode`]), default ([`default_pod`]), UID ([`static_uid`]), the
//! changes for this node, validation ([`validate_pod`]), references to API objects ([`api_reference`]). [`load`] does them all.
//! Nothing here reads files, clocks or the environment.

pub mod checkpoint;
mod decode;
mod defaults;
mod dump;
mod hash;
mod image;
mod json;
mod load;
pub mod managers;
mod node;
mod references;
mod resources;
mod schema;
mod validate;
mod yaml;

pub use decode::{MAX_BYTES, decode};
pub use defaults::default_pod;
pub use dump::static_uid;
pub use hash::{container_hash, container_hash_text, string_checksum};
pub use load::{load, standing_name};
pub use references::api_reference;
pub use validate::{FieldError, validate_pod};

/// Where a manifest came from; static pod UIDs depend on it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    /// A file, by its full path as it was read.
    File(String),
    /// A URL.
    Url(String),
}

/// Feature gates that decide which static pods are accepted. `Default` is what Kubernetes 1.36 has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gates {
    /// `PreventStaticPodAPIReferences`
    pub prevent_static_pod_api_references: bool,
    /// `PodLevelResources`
    pub pod_level_resources: bool,
    /// `ContainerRestartRules`
    pub container_restart_rules: bool,
    /// `RestartAllContainersOnContainerExits`
    pub restart_all_containers: bool,
    /// `TaintTolerationComparisonOperators`
    pub taint_toleration_comparison_operators: bool,
}

impl Default for Gates {
    fn default() -> Self {
        Self {
            prevent_static_pod_api_references: true,
            pod_level_resources: true,
            container_restart_rules: true,
            restart_all_containers: true,
            taint_toleration_comparison_operators: false,
        }
    }
}

/// A manifest, or one pod of it, cannot be used. Texts are those of the Go kubelet where it has one.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ManifestError {
    /// The file holds no pod that can be decoded.
    #[error("{path}: couldn't parse as pod({reason}), please check config file")]
    File {
        /// Its path.
        path: String,
        /// Why.
        reason: String,
    },
    /// The answer holds no pod, or list of pods, that can be decoded.
    #[error("{url}: couldn't parse as single or multiple pods ({reason})")]
    Url {
        /// Where it was read.
        url: String,
        /// Why.
        reason: String,
    },
    /// The pod has no name.
    #[error("invalid pod: name is needed for the pod")]
    NoName,
    /// The pod breaks the API's rules.
    #[error("invalid pod: [{}]", join(.0))]
    Invalid(Vec<FieldError>),
    /// The pod refers to API objects of this kind.
    #[error("static pods may not reference {0}")]
    Reference(&'static str),
    /// A projected volume has a source of no known kind.
    #[error("unknown source for projected volume {0:?}")]
    UnknownSource(String),
    /// The pod uses what only API pods may, with the gate against references off.
    #[error("static pods may not use {0}")]
    Forbidden(&'static str),
    /// A name, or the UID that the manifest gives, would lead out of the pod's directory.
    #[error("invalid pod: {0}")]
    Name(model::pod::BadPod),
}

fn join(errors: &[FieldError]) -> String {
    errors.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}
