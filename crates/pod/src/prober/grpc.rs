//! The gRPC health protocol, `grpc.health.v1.Health/Check`: one unary call on a connection of its own.

use std::time::Duration;

use decide::text::go_duration;
use tokio::time::Instant;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};

#[derive(Clone, PartialEq, prost::Message)]
struct CheckRequest {
    #[prost(string, tag = "1")]
    service: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct CheckResponse {
    #[prost(int32, tag = "1")]
    status: i32,
}

/// What the service says of itself.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Serving {
    /// SERVING.
    Yes,
    /// Anything else, by its name.
    No(&'static str),
}

/// A server that is not there yet is tried again after this long, as gRPC clients do.
const RECONNECT: Duration = Duration::from_secs(1);

/// Asks `host:port` about a service within the limit; the empty name is the server as a whole.
///
/// # Errors
/// Go's words for the event: why there was no answer.
pub(super) async fn check(host: &str, port: u16, service: &str, limit: Duration) -> Result<Serving, String> {
    let deadline = Instant::now() + limit;
    let authority = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
    let endpoint = Endpoint::from_shared(format!("http://{authority}"))
        .and_then(|e| e.user_agent("kube-probe/1.36"))
        .map_err(|e| format!("error: failed to connect service at \"{authority}\": {e}"))?;
    let connect = async {
        loop {
            match endpoint.connect().await {
                Ok(channel) => break channel,
                Err(_) => tokio::time::sleep(RECONNECT).await,
            }
        }
    };
    let limit = go_duration(limit);
    let channel = tokio::time::timeout_at(deadline, connect).await.map_err(|_| {
        format!("timeout: failed to connect service \"{authority}\" within {limit}: context deadline exceeded")
    })?;
    let asked = tokio::time::timeout_at(deadline, ask(channel, service)).await;
    match asked.map_err(|_| format!("timeout: health rpc did not complete within {limit}"))? {
        Ok(answer) => Ok(match answer.status {
            1 => Serving::Yes,
            0 => Serving::No("UNKNOWN"),
            3 => Serving::No("SERVICE_UNKNOWN"),
            _ => Serving::No("NOT_SERVING"),
        }),
        Err(status) if status.code() == tonic::Code::Unimplemented => Err(format!(
            "error: this server does not implement the grpc health protocol (grpc.health.v1.Health): {}",
            status.message()
        )),
        Err(status) => Err(format!(
            "error: health rpc probe failed: rpc error: code = {:?} desc = {}",
            status.code(),
            status.message()
        )),
    }
}

async fn ask(channel: Channel, service: &str) -> Result<CheckResponse, tonic::Status> {
    let mut client = tonic::client::Grpc::new(channel);
    client.ready().await.map_err(|e| tonic::Status::unavailable(e.to_string()))?;
    let codec = tonic_prost::ProstCodec::<CheckRequest, CheckResponse>::default();
    let path = PathAndQuery::from_static("/grpc.health.v1.Health/Check");
    let request = tonic::Request::new(CheckRequest { service: service.to_owned() });
    client.unary(request, path, codec).await.map(tonic::Response::into_inner)
}
