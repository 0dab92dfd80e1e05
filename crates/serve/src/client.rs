//! Asking a running rubelet over its local socket, for the command line.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http::header::HOST;
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Empty, Limited};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;

use crate::local::ErrorBody;

const CONNECT: Duration = Duration::from_secs(3);
const TOTAL: Duration = Duration::from_secs(10);
/// 1,000 pods with long time lines stay well below.
const MAX_ANSWER: usize = 64 << 20;

/// Why a running rubelet could not be asked; the text says what to do.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// There is no socket, or nobody listens on it.
    #[error("no rubelet answers at {}: is rubelet running with this --root-dir?", socket.display())]
    NotRunning {
        /// The socket's path.
        socket: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Not allowed to open the socket.
    #[error("may not open {}: run as root", socket.display())]
    Forbidden {
        /// The socket's path.
        socket: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Connected, but no answer came in time.
    #[error(
        "rubelet at {} did not answer within {} s: it hangs; its log (journalctl -u kubelet) may say why, a restart of it leaves containers running",
        socket.display(), after.as_secs()
    )]
    Hung {
        /// The socket's path.
        socket: PathBuf,
        /// For how long it was waited.
        after: Duration,
    },
    /// The connection broke.
    #[error("the connection to rubelet at {} broke: it may be restarting, try again", socket.display())]
    Broken {
        /// The socket's path.
        socket: PathBuf,
        /// What went wrong.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// rubelet refused; its own words.
    #[error("{message}")]
    Refused {
        /// 404: nothing of that name; 409: several.
        status: StatusCode,
        /// What rubelet said.
        message: String,
    },
    /// The path holds what a URL cannot.
    #[error("{path:?} is no valid name")]
    BadPath {
        /// The path.
        path: String,
        /// What is wrong with it.
        source: http::Error,
    },
    /// The answer is not what was asked for.
    #[error("the answer to {path} was not understood: is the running rubelet of another version than this command?")]
    Undecodable {
        /// The path.
        path: String,
        /// Where it differs.
        source: serde_json::Error,
    },
}

/// Gets a path of the local API ([`API_VERSION`](crate::API_VERSION)), as `/v1/pods`. At most 3 s to connect, 10 s in all.
///
/// # Errors
/// Each way it can fail has its own advice; see [`ClientError`].
pub async fn get_json<T: DeserializeOwned>(socket: &Path, path: &str) -> Result<T, ClientError> {
    let (status, body) = match tokio::time::timeout(TOTAL, get(socket, path)).await {
        Ok(answer) => answer?,
        Err(_) => {
            return Err(ClientError::Hung { socket: socket.to_owned(), after: TOTAL });
        }
    };
    if status != StatusCode::OK {
        let message = match serde_json::from_slice(&body) {
            Ok(ErrorBody { error }) => error,
            Err(_) => format!("rubelet answered {status}: {}", String::from_utf8_lossy(&body).trim_end()),
        };
        return Err(ClientError::Refused { status, message });
    }
    serde_json::from_slice(&body).map_err(|source| ClientError::Undecodable { path: path.to_owned(), source })
}

async fn get(socket: &Path, path: &str) -> Result<(StatusCode, bytes::Bytes), ClientError> {
    let request = Request::get(path)
        .header(HOST, "localhost")
        .body(Empty::<bytes::Bytes>::new())
        .map_err(|source| ClientError::BadPath { path: path.to_owned(), source })?;

    let owned = || socket.to_owned();
    let stream = match tokio::time::timeout(CONNECT, UnixStream::connect(socket)).await {
        Err(_) => {
            return Err(ClientError::Hung { socket: owned(), after: CONNECT });
        }
        Ok(Err(source)) if source.kind() == io::ErrorKind::PermissionDenied => {
            return Err(ClientError::Forbidden { socket: owned(), source });
        }
        // Its queue is full: it accepts nothing any more.
        Ok(Err(source)) if source.kind() == io::ErrorKind::WouldBlock => {
            return Err(ClientError::Hung { socket: owned(), after: Duration::ZERO });
        }
        Ok(Err(source)) => {
            return Err(ClientError::NotRunning { socket: owned(), source });
        }
        Ok(Ok(stream)) => stream,
    };
    let broken = |source| ClientError::Broken { socket: owned(), source };
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|cause| broken(cause.into()))?;
    let exchange = async {
        let answer = sender.send_request(request).await.map_err(|cause| broken(cause.into()))?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), MAX_ANSWER).collect().await.map_err(broken)?;
        Ok((status, body.to_bytes()))
    };
    tokio::pin!(exchange);
    tokio::select! {
        biased;
        answer = &mut exchange => answer,
        // The connection ends first when rubelet closes it after the answer; what has been read is still to be taken.
        _ = connection => exchange.await,
    }
}

#[cfg(test)]
mod tests;
