//! The kubelet's side of registration: the socket that device plugins come to.

use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use tokio::net::UnixListener;
use tonic::transport::Server;
use tonic::{Request, Response, Status};
use tracing::{error, info, warn};

use super::{DevicePlugins, SOCKET, VERSION, lock};
use crate::callers::connections;
use crate::wire::deviceplugin_v1beta1::registration_server::{Registration, RegistrationServer};
use crate::wire::deviceplugin_v1beta1::{Empty, RegisterRequest};

impl DevicePlugins {
    /// Removes the sockets of earlier plugins, which come and register anew when they see that, and serves registrations until the agent stops.
    ///
    /// # Errors
    /// What was attempted with the directory or the socket, and why it failed.
    pub async fn serve(&self) -> Result<(), std::io::Error> {
        let (dir, about) = (self.0.dir.clone(), self.0.dir.display().to_string());
        let at = |what: &str, e: std::io::Error| std::io::Error::new(e.kind(), format!("{what} {about}: {e}"));
        tokio::task::spawn_blocking(move || clean(&dir))
            .await
            .map_err(std::io::Error::other)?
            .map_err(|e| at("clean the directory of device plugins", e))?;
        let listener =
            UnixListener::bind(self.0.dir.join(SOCKET)).map_err(|e| at("listen for device plugins in", e))?;
        let this = self.clone();
        tokio::spawn(async move {
            let stop = this.0.stop.clone();
            let served = Server::builder()
                .add_service(RegistrationServer::new(Service(this.clone())))
                .serve_with_incoming_shutdown(connections(listener), stop.cancelled())
                .await;
            if let Err(e) = served {
                let text = format!(
                    "device registration error: device plugin registration gRPC server failed and no device plugins can register: {e}"
                );
                error!(err = text, "Error while serving device plugin registration grpc server");
                *lock(&this.0.broken) = Some(text);
            }
        });
        Ok(())
    }
}

/// Removes sockets; the checkpoint and what others put there stays.
fn clean(dir: &Path) -> std::io::Result<()> {
    host::fsx::ensure_dirs(dir, 0o750).map_err(|e| std::io::Error::other(e.full()))?;
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_socket()
            && let Err(e) = std::fs::remove_file(entry.path())
            && e.kind() != std::io::ErrorKind::NotFound
        {
            return Err(e);
        }
    }
    Ok(())
}

/// A plugin names a socket beside this one, and no other file of the host.
pub(crate) fn is_socket_name(endpoint: &str) -> bool {
    !endpoint.is_empty() && !endpoint.contains(['/', '\0']) && endpoint != SOCKET && !endpoint.starts_with("..")
}

struct Service(DevicePlugins);

#[tonic::async_trait]
impl Registration for Service {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let RegisterRequest { version, endpoint, resource_name: resource, .. } = request.into_inner();
        info!(resource, endpoint, "Got registration request from device plugin with resource");
        self.0.0.listener.registering(&resource);
        let refuse = |why: String| {
            warn!(resource, err = why, "Bad registration request from device plugin with resource");
            Err(Status::unknown(why))
        };
        if version != VERSION {
            return refuse(format!(
                "requested API version {version:?} is not supported by kubelet. Supported version is [{VERSION:?}]"
            ));
        }
        if !decide::devices::is_extended_resource(&resource) {
            return refuse(format!("the ResourceName {resource:?} is invalid"));
        }
        if !is_socket_name(&endpoint) {
            return refuse(format!("the endpoint {endpoint:?} is not the name of a socket in this directory"));
        }
        match self.0.connect(&resource, &self.0.0.dir.join(&endpoint)).await {
            Ok(()) => Ok(Response::new(Empty {})),
            Err(why) => refuse(why),
        }
    }
}
