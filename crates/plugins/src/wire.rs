//! What goes over the sockets: messages and clients, and the channel to a socket.

use std::io;
use std::path::PathBuf;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};
use tower::service_fn;

/// Package `csi.v1`.
#[allow(missing_docs, unreachable_pub, clippy::all)]
pub mod csi_v1 {
    tonic::include_proto!("csi.v1");
}

/// Package `pluginregistration`.
#[allow(missing_docs, unreachable_pub, clippy::all)]
pub mod registration_v1 {
    tonic::include_proto!("pluginregistration");
}

/// Secrets are only told by their number.
macro_rules! without_secrets {
    ($($message:ident),*) => {$(
        impl std::fmt::Debug for csi_v1::$message {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($message))
                    .field("volume_id", &self.volume_id)
                    .field("secrets", &self.secrets.len())
                    .finish_non_exhaustive()
            }
        }
    )*};
}
without_secrets!(NodeStageVolumeRequest, NodePublishVolumeRequest, NodeExpandVolumeRequest);

/// A channel to this socket that connects on first use, and again when the connection was lost. Must be called within a tokio runtime.
pub(crate) fn channel(path: PathBuf) -> Channel {
    Endpoint::from_static("http://localhost").connect_with_connector_lazy(service_fn(move |_: Uri| {
        let path = path.clone();
        async move {
            match UnixStream::connect(&path).await {
                Ok(stream) => Ok(TokioIo::new(stream)),
                Err(error) => {
                    let cause = match error.kind() {
                        io::ErrorKind::NotFound => "no such file or directory".into(),
                        io::ErrorKind::ConnectionRefused => "connection refused".into(),
                        _ => error.to_string(),
                    };
                    let text = format!(
                        "connection error: desc = \"transport: Error while dialing: dial unix {}: connect: {cause}\"",
                        path.display()
                    );
                    Err(io::Error::new(error.kind(), text))
                }
            }
        }
    }))
}

/// A call failed, with the code and text that gRPC gives.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rpc error: code = {} desc = {message}", code_name(*code))]
pub struct RpcError {
    /// gRPC's number.
    pub code: i32,
    /// The driver's text, or what happened to the connection.
    pub message: String,
}

impl RpcError {
    /// No answer came in time.
    pub(crate) fn timed_out() -> Self {
        Self { code: tonic::Code::DeadlineExceeded as i32, message: "context deadline exceeded".to_owned() }
    }

    /// gRPC's name of its code.
    pub fn code_name(&self) -> &'static str {
        code_name(self.code)
    }

    /// False when the driver may still be at it, or may have done it: what failed so may have happened.
    pub fn is_final(&self) -> bool {
        use tonic::Code;
        !matches!(
            Code::from_i32(self.code),
            Code::Cancelled | Code::DeadlineExceeded | Code::Unavailable | Code::ResourceExhausted | Code::Aborted
        )
    }
}

impl From<tonic::Status> for RpcError {
    fn from(status: tonic::Status) -> Self {
        use std::error::Error;
        let causes = || std::iter::successors(status.source(), |&e| e.source());
        let code = status.code() as i32;
        if causes().any(|e| e.is::<tonic::ConnectError>()) {
            let message = causes().last().map_or_else(|| status.message().to_owned(), ToString::to_string);
            return Self { code: tonic::Code::Unavailable as i32, message };
        }
        if causes().any(|e| e.is::<tonic::TimeoutExpired>()) {
            return Self::timed_out();
        }
        if let Some(cause) = causes().last() {
            let message = format!("error reading from server: {cause}");
            return Self { code: tonic::Code::Unavailable as i32, message };
        }
        Self { code, message: status.message().to_owned() }
    }
}

fn code_name(code: i32) -> &'static str {
    use tonic::Code;
    match Code::from_i32(code) {
        Code::Ok => "OK",
        Code::Cancelled => "Canceled",
        Code::Unknown => "Unknown",
        Code::InvalidArgument => "InvalidArgument",
        Code::DeadlineExceeded => "DeadlineExceeded",
        Code::NotFound => "NotFound",
        Code::AlreadyExists => "AlreadyExists",
        Code::PermissionDenied => "PermissionDenied",
        Code::ResourceExhausted => "ResourceExhausted",
        Code::FailedPrecondition => "FailedPrecondition",
        Code::Aborted => "Aborted",
        Code::OutOfRange => "OutOfRange",
        Code::Unimplemented => "Unimplemented",
        Code::Internal => "Internal",
        Code::Unavailable => "Unavailable",
        Code::DataLoss => "DataLoss",
        Code::Unauthenticated => "Unauthenticated",
    }
}
