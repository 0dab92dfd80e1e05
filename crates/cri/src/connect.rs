//! From an endpoint's text to a channel that connects on first use and again whenever the connection was lost.

use std::io;
use std::path::{Path, PathBuf};

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};
use tower::service_fn;

/// An endpoint that cannot be used, whatever the runtime does.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// No endpoint was given.
    #[error("the runtime endpoint is empty")]
    Empty,
    /// Another scheme than `unix`: the interface is only spoken over unix sockets here.
    #[error("runtime endpoint {0:?}: only support unix socket endpoint")]
    NotUnix(String),
    /// Not an absolute path.
    #[error("runtime endpoint {0:?}: the socket's path must be absolute, as in unix:///run/containerd/containerd.sock")]
    NotAbsolute(String),
}

/// Reads `unix:///path`, or the older form, a bare path.
pub(crate) fn socket_path(endpoint: &str) -> Result<PathBuf, ConnectError> {
    if endpoint.is_empty() {
        return Err(ConnectError::Empty);
    }
    let path = match endpoint.split_once(':') {
        Some(("unix", rest)) => rest.strip_prefix("//").unwrap_or(rest),
        Some((scheme, _)) if !scheme.contains('/') => {
            return Err(ConnectError::NotUnix(endpoint.into()));
        }
        _ => endpoint,
    };
    if !Path::new(path).is_absolute() {
        return Err(ConnectError::NotAbsolute(endpoint.into()));
    }
    Ok(path.into())
}

/// A channel to this socket. Must be called within a tokio runtime.
pub(crate) fn channel(path: PathBuf) -> Channel {
    // The address only fills the :authority header; Go runtimes refuse an escaped path there, and expect `localhost`.
    Endpoint::from_static("http://localhost")
        // Error texts travel in headers and may be long: runc's output is among them.
        .http2_max_header_list_size(1 << 20)
        .connect_with_connector_lazy(service_fn(move |_: Uri| {
            let path = path.clone();
            async move {
                match UnixStream::connect(&path).await {
                    Ok(stream) => Ok(TokioIo::new(stream)),
                    Err(error) => Err(io::Error::new(error.kind(), dial_error(&path, &error))),
                }
            }
        }))
}

/// Go's text for a failed dial, which people search for.
fn dial_error(path: &Path, error: &io::Error) -> String {
    let cause = match error.kind() {
        io::ErrorKind::NotFound => "no such file or directory".into(),
        io::ErrorKind::ConnectionRefused => "connection refused".into(),
        io::ErrorKind::PermissionDenied => "permission denied".into(),
        _ => error.to_string(),
    };
    format!(
        "connection error: desc = \"transport: Error while dialing: dial unix {}: connect: {cause}\"",
        path.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints() {
        for (endpoint, path) in [
            ("unix:///run/containerd/containerd.sock", "/run/containerd/containerd.sock"),
            ("unix:/run/crio/crio.sock", "/run/crio/crio.sock"),
            ("/run/containerd/containerd.sock", "/run/containerd/containerd.sock"),
            ("/run/odd:name.sock", "/run/odd:name.sock"),
        ] {
            assert_eq!(socket_path(endpoint), Ok(PathBuf::from(path)), "{endpoint}");
        }
        assert_eq!(socket_path(""), Err(ConnectError::Empty));
        for endpoint in ["tcp://127.0.0.1:3735", "npipe:////./pipe/containerd-containerd", "http://localhost"] {
            assert_eq!(socket_path(endpoint), Err(ConnectError::NotUnix(endpoint.into())), "{endpoint}");
        }
        for endpoint in ["unix://", "unix://run/x.sock", "run/x.sock"] {
            assert_eq!(socket_path(endpoint), Err(ConnectError::NotAbsolute(endpoint.into())), "{endpoint}");
        }
    }
}
