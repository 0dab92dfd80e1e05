//! The messages of the Container Runtime Interface, version v1, as of Kubernetes 1.36.
//!
//! Messages only: the clients are in `cri`, so that crates which merely build or read messages stay free of gRPC.

/// Package `runtime.v1`. Maps are [`BTreeMap`](std::collections::BTreeMap)s.
#[allow(missing_docs, clippy::all)]
pub mod v1 {
    include!(concat!(env!("OUT_DIR"), "/runtime.v1.rs"));
}

impl std::fmt::Debug for v1::AuthConfig {
    /// Secrets are only told apart from absent ones.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let hide = |secret: &str| if secret.is_empty() { "" } else { "[redacted]" };
        f.debug_struct("AuthConfig")
            .field("username", &self.username)
            .field("password", &hide(&self.password))
            .field("auth", &hide(&self.auth))
            .field("server_address", &self.server_address)
            .field("identity_token", &hide(&self.identity_token))
            .field("registry_token", &hide(&self.registry_token))
            .finish()
    }
}
