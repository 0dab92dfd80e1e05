//! A small CSI driver for tests: volumes are directories below one folder, mounts are bind mounts, and every call can be made to fail, hang,
//! crash, or lose its answer.
//!
//! ```text
//! DATA/volumes/HANDLE/       the volume's content; `_size` beside it: HANDLE.size
//! DATA/faults.json           what goes wrong, read at each call: {"NodePublishVolume": {"handle": "v1", "hang": true}}
//! DATA/health                what is wrong with all volumes, when it is there
//! DATA/limit                 most volumes on the node, when it is there
//! DATA/calls.jsonl           one line for each call: method, request, answer
//! ```
//!
//! Stage binds the volume's directory onto the staging path, publish binds that (or, without staging, the directory) onto the target. For a
//! volume in block mode the target becomes a device node. What stands already is left as it is, so each call may come twice.

mod authority;
mod faults;
mod log;
mod node;

use std::path::PathBuf;

use clap::Parser;
use plugins::wire::registration_v1 as reg;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status};

/// Server sides.
#[allow(unreachable_pub, missing_docs, clippy::all)]
pub(crate) mod served {
    pub mod csi {
        tonic::include_proto!("csi.v1");
    }
    pub mod registration {
        tonic::include_proto!("pluginregistration");
    }
}

/// What the driver is.
#[derive(Clone, Debug, Parser)]
struct Arguments {
    /// Name of the driver.
    #[arg(long)]
    name: String,
    /// Identity of the node to the driver.
    #[arg(long, default_value = "csi-node")]
    node_id: String,
    /// Folder of the registration socket (`ROOT/plugins_registry`).
    #[arg(long)]
    registry: PathBuf,
    /// Folder of everything else: the driver's socket, volumes, faults, calls.
    #[arg(long)]
    data: PathBuf,
    /// Capabilities of the node service.
    #[arg(long, value_delimiter = ',', default_value = "stage,stats,expand")]
    capabilities: Vec<String>,
    /// Topology, KEY=VALUE.
    #[arg(long)]
    topology: Option<String>,
    /// Most volumes on the node; 0: not limited.
    #[arg(long, default_value_t = 0)]
    limit: i64,
    /// Type that the registration names.
    #[arg(long, default_value = "CSIPlugin")]
    kind: String,
    /// Versions that the registration names.
    #[arg(long, value_delimiter = ',', default_value = "1.0.0")]
    versions: Vec<String>,
}

struct Registration {
    info: reg::PluginInfo,
    log: log::Log,
}

#[tonic::async_trait]
impl served::registration::registration_server::Registration for Registration {
    async fn get_info(&self, _: Request<reg::InfoRequest>) -> Result<Response<reg::PluginInfo>, Status> {
        self.log.line("GetInfo", serde_json::json!({}), "OK");
        Ok(Response::new(self.info.clone()))
    }

    async fn notify_registration_status(
        &self,
        request: Request<reg::RegistrationStatus>,
    ) -> Result<Response<reg::RegistrationStatusResponse>, Status> {
        let told = request.into_inner();
        let request = serde_json::json!({"plugin_registered": told.plugin_registered, "error": told.error});
        self.log.line("NotifyRegistrationStatus", request, "OK");
        Ok(Response::new(reg::RegistrationStatusResponse {}))
    }
}

fn bind(path: &std::path::Path) -> anyhow::Result<UnixListener> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e.into()),
        _ => {}
    }
    Ok(UnixListener::bind(path)?)
}

fn listen(path: &std::path::Path) -> anyhow::Result<UnixListenerStream> {
    Ok(UnixListenerStream::new(bind(path)?))
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    std::fs::create_dir_all(arguments.data.join("volumes"))?;
    let log = log::Log::open(&arguments.data)?;
    let socket = arguments.data.join("csi.sock");
    let node = node::Node::new(&arguments, log.clone());
    let registration = Registration {
        info: reg::PluginInfo {
            r#type: arguments.kind.clone(),
            name: arguments.name.clone(),
            endpoint: socket.display().to_string(),
            supported_versions: arguments.versions.clone(),
        },
        log,
    };
    let driver = tonic::transport::Server::builder()
        .add_service(served::csi::identity_server::IdentityServer::new(node.clone()))
        .add_service(served::csi::node_server::NodeServer::new(node))
        .serve_with_incoming(listen(&socket)?);
    let registry = arguments.registry.join(format!("{}-reg.sock", arguments.name));
    let inner = arguments.data.join("registration.sock");
    let registered = tonic::transport::Server::builder()
        .add_service(served::registration::registration_server::RegistrationServer::new(registration))
        .serve_with_incoming(listen(&inner)?);
    let outer = authority::serve(bind(&registry)?, inner);
    tokio::select! {
        ended = driver => ended?,
        ended = registered => ended?,
        () = outer => {}
        _ = tokio::signal::ctrl_c() => {}
    }
    let _ = std::fs::remove_file(registry);
    Ok(())
}
