//! The fake runtime on a unix socket, in the real wire format.
//!
//! A lost answer breaks every connection, and a runtime that is down has no socket: clients see what they would see.

use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use cri_api::v1;
use futures::stream::{self, BoxStream, StreamExt};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::server::Connected;
use tonic::{Code, Request, Response, Status};

use crate::runtime::state::Refusal;
use crate::runtime::{Answer, Ending, FakeRuntime};

#[allow(missing_docs, unreachable_pub, clippy::all)]
mod stubs {
    tonic::include_proto!("runtime.v1");
}
use stubs::image_service_server::{ImageService, ImageServiceServer};
use stubs::runtime_service_server::{RuntimeService, RuntimeServiceServer};

/// A served fake runtime; the socket goes with it.
pub struct FakeServer {
    path: PathBuf,
    tasks: [JoinHandle<()>; 2],
    runtime: FakeRuntime,
}

impl FakeServer {
    /// The endpoint, as `unix:///path`.
    pub fn endpoint(&self) -> String {
        format!("unix://{}", self.path.display())
    }
}

impl Drop for FakeServer {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
        self.runtime.break_connections();
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Serves a runtime on this socket, until what it returns is dropped.
///
/// # Errors
/// When the socket cannot be made.
pub fn serve(runtime: &FakeRuntime, path: &Path) -> io::Result<FakeServer> {
    let (accepted, connections) = mpsc::channel(16);
    let listener = UnixListener::bind(path)?;
    let accepting = tokio::spawn(accept(runtime.clone(), path.into(), listener, accepted));
    let incoming = ReceiverStream::new(connections).map(Ok::<_, io::Error>);
    let served = Served(runtime.clone());
    let serving = tokio::spawn(async move {
        let server = tonic::transport::Server::builder()
            .add_service(RuntimeServiceServer::new(served.clone()).max_decoding_message_size(usize::MAX))
            .add_service(ImageServiceServer::new(served).max_decoding_message_size(usize::MAX));
        // It ends when the channel of connections does, or is aborted.
        let _ = server.serve_with_incoming(incoming).await;
    });
    Ok(FakeServer { path: path.into(), tasks: [accepting, serving], runtime: runtime.clone() })
}

/// Accepts while the runtime is up; a runtime that is down has no socket.
async fn accept(runtime: FakeRuntime, path: PathBuf, first: UnixListener, accepted: mpsc::Sender<Connection>) {
    let mut listener = Some(first);
    loop {
        let mut changed = runtime.changes_seen();
        let mut connections = runtime.connections();
        let token = connections.borrow_and_update().clone();
        if !runtime.is_up() {
            if listener.take().is_some() {
                let _ = std::fs::remove_file(&path);
            }
            if changed.changed().await.is_err() {
                return;
            }
            continue;
        }
        let Some(open) = &listener else {
            match UnixListener::bind(&path) {
                Ok(open) => listener = Some(open),
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
            continue;
        };
        tokio::select! {
            biased;
            _ = connections.changed() => {}
            stream = open.accept() => if let Ok((stream, _)) = stream
                && accepted.send(Connection::new(stream, token)).await.is_err()
            {
                return;
            }
        }
    }
}

/// A connection that breaks when the runtime says so.
struct Connection {
    stream: UnixStream,
    broken: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl Connection {
    fn new(stream: UnixStream, token: CancellationToken) -> Self {
        Self { stream, broken: Box::pin(token.cancelled_owned()) }
    }

    fn check(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        match self.broken.as_mut().poll(context) {
            Poll::Ready(()) => Err(io::ErrorKind::ConnectionReset.into()),
            Poll::Pending => Ok(()),
        }
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check(context)?;
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.check(context)?;
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check(context)?;
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

impl Connected for Connection {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

#[derive(Clone)]
struct Served(FakeRuntime);

impl Served {
    async fn answer<T>(&self, answer: impl Future<Output = Answer<T>>) -> Result<T, Status> {
        match answer.await {
            Ok(answer) => Ok(answer),
            Err(Ending::Refused(Refusal(code, message))) => Err(Status::new(Code::from_i32(code), message)),
            Err(Ending::Lost | Ending::Unreachable) => {
                self.0.break_connections();
                std::future::pending().await
            }
        }
    }
}

type Parts<T> = BoxStream<'static, Result<T, Status>>;

macro_rules! service {
    ($trait:ident
        { $($method:ident($request:ident) -> $response:ident = |$fake:ident, $asked:ident| $answer:expr;)* }
        { $($stream:ident($stream_request:ident) -> $stream_response:ident as $type:ident = $parts:ident;)* }
        { $($more:tt)* }
    ) => {
        #[async_trait::async_trait]
        impl $trait for Served {
            $(async fn $method(&self, request: Request<v1::$request>) -> Result<Response<v1::$response>, Status> {
                let ($fake, $asked) = (&self.0, request.into_inner());
                self.answer($answer).await.map(Response::new)
            })*
            $(
                type $type = Parts<v1::$stream_response>;
                async fn $stream(&self, request: Request<v1::$stream_request>) -> Result<Response<Self::$type>, Status> {
                    let parts = self.answer(self.0.$parts(request.into_inner())).await?;
                    Ok(Response::new(stream::iter(parts).map(Ok).boxed()))
                }
            )*
            $($more)*
        }
    };
}

service! { RuntimeService {
    version(VersionRequest) -> VersionResponse = |fake, _request| fake.rpc_version();
    status(StatusRequest) -> StatusResponse = |fake, request| fake.rpc_status(request);
    runtime_config(RuntimeConfigRequest) -> RuntimeConfigResponse = |fake, _request| fake.rpc_runtime_config();
    update_runtime_config(UpdateRuntimeConfigRequest) -> UpdateRuntimeConfigResponse
        = |fake, request| fake.rpc_update_runtime_config(request);
    run_pod_sandbox(RunPodSandboxRequest) -> RunPodSandboxResponse = |fake, request| fake.rpc_run_pod_sandbox(request);
    stop_pod_sandbox(StopPodSandboxRequest) -> StopPodSandboxResponse = |fake, request| fake.rpc_stop_pod_sandbox(request);
    remove_pod_sandbox(RemovePodSandboxRequest) -> RemovePodSandboxResponse
        = |fake, request| fake.rpc_remove_pod_sandbox(request);
    pod_sandbox_status(PodSandboxStatusRequest) -> PodSandboxStatusResponse
        = |fake, request| fake.rpc_pod_sandbox_status(request);
    list_pod_sandbox(ListPodSandboxRequest) -> ListPodSandboxResponse = |fake, request| fake.rpc_list_pod_sandbox(request);
    update_pod_sandbox_resources(UpdatePodSandboxResourcesRequest) -> UpdatePodSandboxResourcesResponse
        = |fake, request| fake.rpc_update_pod_sandbox_resources(request);
    port_forward(PortForwardRequest) -> PortForwardResponse = |fake, request| fake.rpc_port_forward(request);
    create_container(CreateContainerRequest) -> CreateContainerResponse = |fake, request| fake.rpc_create_container(request);
    start_container(StartContainerRequest) -> StartContainerResponse = |fake, request| fake.rpc_start_container(request);
    stop_container(StopContainerRequest) -> StopContainerResponse = |fake, request| fake.rpc_stop_container(request);
    remove_container(RemoveContainerRequest) -> RemoveContainerResponse = |fake, request| fake.rpc_remove_container(request);
    container_status(ContainerStatusRequest) -> ContainerStatusResponse = |fake, request| fake.rpc_container_status(request);
    list_containers(ListContainersRequest) -> ListContainersResponse = |fake, request| fake.rpc_list_containers(request);
    update_container_resources(UpdateContainerResourcesRequest) -> UpdateContainerResourcesResponse
        = |fake, request| fake.rpc_update_container_resources(request);
    reopen_container_log(ReopenContainerLogRequest) -> ReopenContainerLogResponse
        = |fake, request| fake.rpc_reopen_container_log(request);
    exec_sync(ExecSyncRequest) -> ExecSyncResponse = |fake, request| fake.rpc_exec_sync(request);
    exec(ExecRequest) -> ExecResponse = |fake, request| fake.rpc_exec(request);
    attach(AttachRequest) -> AttachResponse = |fake, request| fake.rpc_attach(request);
    checkpoint_container(CheckpointContainerRequest) -> CheckpointContainerResponse
        = |fake, request| fake.rpc_checkpoint_container(request);
    container_stats(ContainerStatsRequest) -> ContainerStatsResponse = |fake, request| fake.rpc_container_stats(request);
    list_container_stats(ListContainerStatsRequest) -> ListContainerStatsResponse
        = |fake, request| fake.rpc_list_container_stats(request);
    pod_sandbox_stats(PodSandboxStatsRequest) -> PodSandboxStatsResponse = |fake, request| fake.rpc_pod_sandbox_stats(request);
    list_pod_sandbox_stats(ListPodSandboxStatsRequest) -> ListPodSandboxStatsResponse
        = |fake, request| fake.rpc_list_pod_sandbox_stats(request);
    list_metric_descriptors(ListMetricDescriptorsRequest) -> ListMetricDescriptorsResponse
        = |fake, _request| fake.rpc_list_metric_descriptors();
    list_pod_sandbox_metrics(ListPodSandboxMetricsRequest) -> ListPodSandboxMetricsResponse
        = |fake, _request| fake.rpc_list_pod_sandbox_metrics();
    } {
    stream_pod_sandboxes(StreamPodSandboxesRequest) -> StreamPodSandboxesResponse
        as StreamPodSandboxesStream = rpc_stream_pod_sandboxes;
    stream_containers(StreamContainersRequest) -> StreamContainersResponse
        as StreamContainersStream = rpc_stream_containers;
    stream_container_stats(StreamContainerStatsRequest) -> StreamContainerStatsResponse
        as StreamContainerStatsStream = rpc_stream_container_stats;
    stream_pod_sandbox_stats(StreamPodSandboxStatsRequest) -> StreamPodSandboxStatsResponse
        as StreamPodSandboxStatsStream = rpc_stream_pod_sandbox_stats;
    stream_pod_sandbox_metrics(StreamPodSandboxMetricsRequest) -> StreamPodSandboxMetricsResponse
        as StreamPodSandboxMetricsStream = rpc_stream_pod_sandbox_metrics;
    } {
    type GetContainerEventsStream = Parts<v1::ContainerEventResponse>;

    async fn get_container_events(
        &self,
        _request: Request<v1::GetEventsRequest>,
    ) -> Result<Response<Self::GetContainerEventsStream>, Status> {
        let events = self.answer(async { self.0.events().map_err(Ending::Refused) }).await?;
        Ok(Response::new(events.map(Ok).boxed()))
    }
} }

service! { ImageService {
list_images(ListImagesRequest) -> ListImagesResponse = |fake, request| fake.rpc_list_images(request);
image_status(ImageStatusRequest) -> ImageStatusResponse = |fake, request| fake.rpc_image_status(request);
pull_image(PullImageRequest) -> PullImageResponse = |fake, request| fake.rpc_pull_image(request);
remove_image(RemoveImageRequest) -> RemoveImageResponse = |fake, request| fake.rpc_remove_image(request);
image_fs_info(ImageFsInfoRequest) -> ImageFsInfoResponse = |fake, _request| fake.rpc_image_fs_info();
} {
stream_images(StreamImagesRequest) -> StreamImagesResponse as StreamImagesStream = rpc_stream_images;
} {} }
