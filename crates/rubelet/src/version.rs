//! Versions that rubelet tells of itself.

/// The Kubernetes version whose node agent this is: what installers compare (`kubelet --version`).
pub(crate) const KUBERNETES: &str = "v1.36.1";

/// rubelet's own version.
pub(crate) const RUBELET: &str = env!("CARGO_PKG_VERSION");

/// The commit it was built from, when the build knew it.
pub(crate) const COMMIT: &str = match option_env!("RUBELET_COMMIT") {
    Some(commit) => commit,
    None => "unknown",
};
