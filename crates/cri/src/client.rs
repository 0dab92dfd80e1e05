//! [`CriClient`]: the port over gRPC on a unix socket.
//!
//! Nothing is retried here but RuntimeConfig: whether a call may be repeated is the pod worker's to know. A lost connection
//! is made anew by the next call.

mod mutator;
mod reader;

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use async_trait::async_trait;
use cri_api::v1;
use tokio::sync::Mutex;
use tokio::time::Instant;
use tonic::transport::Channel;
use tonic::{Request, Status, Streaming};

use crate::connect::{ConnectError, channel, socket_path};
use crate::port::{CallObserver, CriError, CriResult, RuntimeStreaming};
use crate::stubs::image_service_client::ImageServiceClient;
use crate::stubs::runtime_service_client::RuntimeServiceClient;

/// The largest answer taken, in bytes: 16 MiB.
pub const MAX_ANSWER: usize = 16 << 20;

/// The version of the interface, as Version asks for it and must answer it.
pub const API_VERSION: &str = "0.1.0";

/// One runtime, and maybe another one for images, behind unix sockets. Cheap to clone.
#[derive(Clone)]
pub struct CriClient {
    runtime: RuntimeServiceClient<Channel>,
    image: ImageServiceClient<Channel>,
    timeout: Duration,
    observer: Option<Arc<dyn CallObserver>>,
    /// Whether lists are asked for in parts; each service loses it when it does not know such lists.
    stream_runtime_lists: Arc<AtomicBool>,
    stream_image_lists: Arc<AtomicBool>,
    /// The newest answer to ImageFsInfo, and when it came.
    image_fs: Arc<Mutex<Option<(Instant, v1::ImageFsInfoResponse)>>>,
}

/// How long an answer to ImageFsInfo serves others: figures, eviction and the collection of images ask at about the same times.
const IMAGE_FS: Duration = Duration::from_secs(2);

/// Calls one method with a deadline on both sides; see [`CriClient::watched`].
macro_rules! rpc {
    ($client:ident.$service:ident.$method:ident, $call:literal, $target:expr, $deadline:expr, $message:expr) => {{
        let deadline: Option<::std::time::Duration> = $deadline;
        let mut service = $client.$service.clone();
        let request = $crate::client::timed($message, deadline);
        let work = async move { service.$method(request).await.map(::tonic::Response::into_inner) };
        $client.watched($call, $target, deadline, work).await
    }};
}

/// Asks for a list in parts if that is wanted and possible, else as a whole.
macro_rules! list {
    ($client:ident.$service:ident, $streaming:ident, $filter:expr,
     $stream:ident $stream_call:literal $stream_request:expr => $stream_items:ident,
     $unary:ident $unary_call:literal $unary_request:expr => $unary_items:ident) => {{
        let filter = $filter;
        let deadline = Some($client.timeout);
        if $client.$streaming.load(Ordering::Relaxed) {
            let mut service = $client.$service.clone();
            let request = $crate::client::timed($stream_request(filter.clone()), deadline);
            let work = async move {
                $crate::client::collect(service.$stream(request).await?.into_inner(), |part| part.$stream_items).await
            };
            match $client.watched($stream_call, "", deadline, work).await {
                Err(error) if error.outcome == Outcome::Unimplemented => {
                    tracing::info!(
                        call = $stream_call,
                        "The runtime has no lists in parts; asking for whole ones from now on"
                    );
                    $client.$streaming.store(false, Ordering::Relaxed);
                }
                answer => return answer,
            }
        }
        rpc!($client.$service.$unary, $unary_call, "", deadline, $unary_request(filter))
            .map(|answer| answer.$unary_items)
    }};
}
use {list, rpc};

impl CriClient {
    /// A client of the runtime at `endpoint` (`unix:///path` or a bare path), and of the image service at `image_endpoint`, by
    /// default the same. Connects with the first call. `request_timeout` is runtimeRequestTimeout, from which each call's
    /// deadline follows. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// When an endpoint is not a unix socket's absolute path.
    pub fn connect(
        endpoint: &str,
        image_endpoint: Option<&str>,
        request_timeout: Duration,
    ) -> Result<Self, ConnectError> {
        let path = socket_path(endpoint)?;
        let image_path = image_endpoint.filter(|endpoint| !endpoint.is_empty()).map(socket_path).transpose()?;
        let runtime = channel(path.clone());
        let image = match image_path {
            Some(other) if other != path => channel(other),
            _ => runtime.clone(),
        };
        Ok(Self {
            runtime: RuntimeServiceClient::new(runtime)
                .max_decoding_message_size(MAX_ANSWER)
                .max_encoding_message_size(usize::MAX),
            image: ImageServiceClient::new(image)
                .max_decoding_message_size(MAX_ANSWER)
                .max_encoding_message_size(usize::MAX),
            timeout: request_timeout,
            observer: None,
            stream_runtime_lists: Arc::default(),
            stream_image_lists: Arc::default(),
            image_fs: Arc::default(),
        })
    }

    /// Whether lists are asked for in parts (feature gate CRIListStreaming, KEP-5825). A runtime that does not know such lists
    /// is asked only once.
    #[must_use]
    pub fn with_list_streaming(mut self, on: bool) -> Self {
        self.stream_runtime_lists = Arc::new(on.into());
        self.stream_image_lists = Arc::new(on.into());
        self
    }

    /// Lets this observer see every call.
    #[must_use]
    pub fn with_observer(mut self, observer: Arc<dyn CallObserver>) -> Self {
        self.observer = Some(observer);
        self
    }

    /// Awaits one call, gives it up at its deadline, and tells the observer.
    async fn watched<T>(
        &self,
        call: &'static str,
        target: &str,
        deadline: Option<Duration>,
        work: impl Future<Output = Result<T, Status>> + Send,
    ) -> CriResult<T> {
        let start = Instant::now();
        let ended = match deadline {
            // The deadline that travels in the request lets the runtime give up too, but tonic's own watch over it ends
            // with the answer's head, and a stalled connection never gets there.
            Some(deadline) => tokio::time::timeout(deadline, work).await,
            None => Ok(work.await),
        };
        let answer = match ended {
            Ok(answer) => answer.map_err(|status| CriError::from_status(call, target, &status)),
            Err(_) => Err(CriError::timed_out(call, target)),
        };
        self.observe(call, start, answer.as_ref().err());
        answer
    }

    fn observe(&self, call: &'static str, start: Instant, error: Option<&CriError>) {
        if let Some(observer) = &self.observer {
            observer.observed(call, start.elapsed(), error);
        }
    }
}

/// A request that tells the runtime its deadline.
fn timed<M>(message: M, deadline: Option<Duration>) -> Request<M> {
    let mut request = Request::new(message);
    if let Some(deadline) = deadline {
        request.set_timeout(deadline);
    }
    request
}

/// The items of a list that comes in parts.
async fn collect<M, T>(mut parts: Streaming<M>, items: impl Fn(M) -> Vec<T>) -> Result<Vec<T>, Status> {
    let mut all = Vec::new();
    while let Some(part) = parts.message().await? {
        all.append(&mut items(part));
    }
    Ok(all)
}

/// Whole seconds, never fewer than asked for.
fn seconds(duration: Duration) -> i64 {
    let up = u64::from(duration.subsec_nanos() > 0);
    i64::try_from(duration.as_secs().saturating_add(up)).unwrap_or(i64::MAX)
}

#[async_trait]
impl RuntimeStreaming for CriClient {
    async fn exec(&self, request: v1::ExecRequest) -> CriResult<String> {
        let id = request.container_id.clone();
        let answer = rpc!(self.runtime.exec, "Exec", &id, Some(self.timeout), request)?;
        url("Exec", &id, answer.url)
    }

    async fn attach(&self, request: v1::AttachRequest) -> CriResult<String> {
        let id = request.container_id.clone();
        let answer = rpc!(self.runtime.attach, "Attach", &id, Some(self.timeout), request)?;
        url("Attach", &id, answer.url)
    }

    async fn port_forward(&self, request: v1::PortForwardRequest) -> CriResult<String> {
        let id = request.pod_sandbox_id.clone();
        let answer = rpc!(self.runtime.port_forward, "PortForward", &id, Some(self.timeout), request)?;
        url("PortForward", &id, answer.url)
    }
}

fn url(call: &'static str, target: &str, url: String) -> CriResult<String> {
    if url.is_empty() { Err(CriError::malformed(call, target, "URL is not set")) } else { Ok(url) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_never_fewer() {
        for (millis, whole) in [(0, 0), (1, 1), (999, 1), (1000, 1), (1001, 2), (30_000, 30)] {
            assert_eq!(seconds(Duration::from_millis(millis)), whole, "{millis} ms");
        }
    }
}
