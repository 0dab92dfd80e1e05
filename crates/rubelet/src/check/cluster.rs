//! Asks the API server that the kubeconfig names for the node's object. Changes nothing, and asks for no certificate.

use std::time::Duration;

use cluster::calls::NodeApi;
use cluster::{Client, ClientOptions, ClusterConfig};
use config::Flags;

use super::facts::{ClusterFacts, ClusterState, Seen};
use crate::version;

/// How long the question may take.
const DEADLINE: Duration = Duration::from_secs(5);

/// What the kubeconfig leads to; None in standalone mode.
pub(super) async fn ask(flags: &Flags, node_name: &Seen<String>) -> Option<ClusterFacts> {
    let kubeconfig = flags.kubeconfig()?;
    let bootstrap = flags.bootstrap_kubeconfig().filter(|_| !kubeconfig.exists());
    let path = bootstrap.clone().unwrap_or(kubeconfig);
    let facts = |server: String, state| Some(ClusterFacts { path: path.clone(), server, state });
    let config = match ClusterConfig::load(&path) {
        Ok(config) => config,
        Err(e) => return facts(String::new(), ClusterState::Unusable(e)),
    };
    let server = config.server.to_string();
    let mut options = ClientOptions::new(version::RUBELET);
    options.deadline = DEADLINE;
    let client = match Client::new(config, options) {
        Ok(client) => client,
        Err(e) => return facts(server, ClusterState::Unusable(e)),
    };
    let name = match node_name {
        Ok(name) => name.clone(),
        Err(why) => return facts(server, ClusterState::NoName(why.clone())),
    };
    let answer = client.get_node(&name, true).await;
    let registered = match answer {
        Ok(_) => true,
        Err(e) if e.is_not_found() => false,
        // Somebody with a bootstrap token may ask for a certificate and nothing else: that the server knows it is all there is to find out.
        Err(e) if bootstrap.is_some() && e.kind == cluster::ErrorKind::Forbidden => false,
        Err(e) => return facts(server, ClusterState::Refused(e)),
    };
    let state = ClusterState::Answers {
        registered,
        bootstrap: bootstrap.is_some(),
        skew: client.clock_skew(),
        expires: client.credentials().expiry().await,
    };
    facts(server, state)
}
