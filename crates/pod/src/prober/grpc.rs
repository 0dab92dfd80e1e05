//! The gRPC health protocol, `grpc.health.v1.Health/Check`: one unary call on a connection of its own.

use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Endpoint;

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

/// Asks `host:port` about a service; the empty name is the server as a whole. The caller sets the deadline.
///
/// # Errors
/// Why there was no answer, in words for the event.
pub(super) async fn check(host: &str, port: u16, service: &str) -> Result<Serving, String> {
    let authority = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
    let endpoint = Endpoint::from_shared(format!("http://{authority}"))
        .and_then(|e| e.user_agent("kube-probe/1.36"))
        .map_err(|e| format!("address {authority} is not usable: {e}"))?;
    let channel = endpoint
        .connect()
        .await
        .map_err(|e| format!("failed to connect service \"{authority}\": {}", crate::ports::error_chain(&e)))?;
    let mut client = tonic::client::Grpc::new(channel);
    client.ready().await.map_err(|e| format!("service \"{authority}\" is not ready: {e}"))?;
    let codec = tonic_prost::ProstCodec::<CheckRequest, CheckResponse>::default();
    let path = PathAndQuery::from_static("/grpc.health.v1.Health/Check");
    let request = tonic::Request::new(CheckRequest { service: service.to_owned() });
    match client.unary(request, path, codec).await {
        Ok(answer) => Ok(match answer.into_inner().status {
            1 => Serving::Yes,
            0 => Serving::No("UNKNOWN"),
            3 => Serving::No("SERVICE_UNKNOWN"),
            _ => Serving::No("NOT_SERVING"),
        }),
        Err(status) if status.code() == tonic::Code::Unimplemented => Err(format!(
            "this server does not implement the grpc health protocol (grpc.health.v1.Health): {}",
            status.message()
        )),
        Err(status) => Err(format!("health rpc failed: {}", status.message())),
    }
}
