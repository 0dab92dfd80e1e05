//! `/run`, `/exec`, `/attach`, `/portForward`: which container is meant, what the runtime is asked, and where its answer goes.

use std::sync::atomic::Ordering;

use cri::port::{CriError, Outcome};
use cri_api::v1;
use http::header::{HeaderValue, RETRY_AFTER};
use http::{HeaderMap, Request, StatusCode};
use hyper::body::Incoming;

use super::route::{Target, first};
use super::websocket::{self, Carry, Ends};
use super::{Connection, PodFacts, Secure, upgrade};
use crate::reply::{Reply, error, reply, service_error};

impl Secure {
    /// The running container that is meant, by id.
    pub(super) async fn running(
        &self,
        target: &Target,
        absent: impl FnOnce() -> String,
    ) -> Result<(PodFacts, String), Box<Reply>> {
        let Some(pod) = self.pods.pod(&target.namespace, &target.pod) else {
            return Err(Box::new(service_error(StatusCode::NOT_FOUND, "pod does not exist")));
        };
        match self.containers.running_container(&pod.uid, &target.container).await {
            Ok(Some(id)) => Ok((pod, id)),
            Ok(None) => Err(Box::new(service_error(StatusCode::INTERNAL_SERVER_ERROR, absent()))),
            Err(e) => Err(Box::new(runtime_error(&e))),
        }
    }

    pub(super) async fn run(&self, target: &Target, parameters: &[(String, String)]) -> Reply {
        let command: Vec<String> = first(parameters, "cmd").unwrap_or_default().split(' ').map(str::to_owned).collect();
        let id = match self.running(target, || format!("container not found ({:?})", target.container)).await {
            Ok((_, id)) => id,
            Err(reply) => return *reply,
        };
        match self.containers.run(&id, command.clone()).await {
            Ok(output) if output.exit_code == 0 => {
                let body = [output.stdout, output.stderr].concat();
                reply(StatusCode::OK, crate::reply::JSON, body)
            }
            Ok(output) => {
                let (command, error) = (command.join(" "), String::from_utf8_lossy(&output.stderr));
                let text = format!("command '{command}' exited with {}: {error}", output.exit_code);
                service_error(StatusCode::INTERNAL_SERVER_ERROR, text)
            }
            Err(e) => service_error(StatusCode::INTERNAL_SERVER_ERROR, e.rpc_text()),
        }
    }

    pub(super) async fn exec(
        &self,
        target: &Target,
        parameters: &[(String, String)],
        request: Request<Incoming>,
        of: &Connection,
    ) -> Reply {
        let Some(ends) = ends(parameters) else { return no_streams() };
        let id = match self.running(target, || format!("container not found ({:?})", target.container)).await {
            Ok((_, id)) => id,
            Err(reply) => return *reply,
        };
        let cmd = parameters.iter().filter(|(k, _)| k == "command").map(|(_, v)| v.clone()).collect();
        let Ends { stdin, stdout, stderr, tty } = ends;
        let asked = v1::ExecRequest { container_id: id, cmd, tty, stdin, stdout, stderr };
        self.session(request, of, Carry::Channels(ends), self.containers.exec(asked)).await
    }

    pub(super) async fn attach(
        &self,
        target: &Target,
        parameters: &[(String, String)],
        request: Request<Incoming>,
        of: &Connection,
    ) -> Reply {
        let Some(ends) = ends(parameters) else { return no_streams() };
        let absent = || format!("container {} not found in pod {}_{}", target.container, target.pod, target.namespace);
        let (pod, id) = match self.running(target, absent).await {
            Ok(found) => found,
            Err(reply) => return *reply,
        };
        // The container has a terminal or not; the client cannot choose.
        let tty = pod.containers.iter().any(|(name, tty)| *name == target.container && *tty);
        let ends = Ends { tty, stderr: ends.stderr && !tty, ..ends };
        let Ends { stdin, stdout, stderr, tty } = ends;
        let asked = v1::AttachRequest { container_id: id, stdin, tty, stdout, stderr };
        self.session(request, of, Carry::Channels(ends), self.containers.attach(asked)).await
    }

    pub(super) async fn port_forward(
        &self,
        target: &Target,
        parameters: &[(String, String)],
        request: Request<Incoming>,
        of: &Connection,
    ) -> Reply {
        let port = match ports(request.headers(), parameters) {
            Ok(port) => port,
            Err(why) => return service_error(StatusCode::BAD_REQUEST, why),
        };
        let Some(pod) = self.pods.pod(&target.namespace, &target.pod) else {
            return service_error(StatusCode::NOT_FOUND, "pod does not exist");
        };
        let pod_sandbox_id = match self.containers.ready_sandbox(&pod.uid).await {
            Ok(Some(id)) => id,
            Ok(None) => {
                let text = format!("pod not found (\"{}_{}\")", target.pod, target.namespace);
                return service_error(StatusCode::INTERNAL_SERVER_ERROR, text);
            }
            Err(e) => return runtime_error(&e),
        };
        let asked = v1::PortForwardRequest { pod_sandbox_id, port };
        self.session(request, of, Carry::Tunnel, self.containers.port_forward(asked)).await
    }

    /// Hands the connection over to the runtime's streaming server.
    async fn session(
        &self,
        request: Request<Incoming>,
        of: &Connection,
        carry: Carry,
        url: impl Future<Output = Result<String, CriError>>,
    ) -> Reply {
        if !upgrade::is_upgrade(request.headers()) {
            return error(StatusCode::INTERNAL_SERVER_ERROR, "Upgrade request required");
        }
        match url.await {
            Ok(url) => {
                of.patience.store(true, Ordering::Relaxed);
                let protocol = if let Carry::Tunnel = carry { websocket::TUNNEL } else { websocket::CHANNELS };
                if self.translate && websocket::offers(request.headers(), protocol) {
                    self.metrics.beside.websocket_translated(subresource(request.uri().path()));
                    return websocket::translate(request, &url, carry, self.streaming_idle, &of.session).await;
                }
                upgrade::proxy(request, &url, self.streaming_idle, &of.session).await
            }
            Err(e) => runtime_error(&e),
        }
    }
}

/// A failure of the runtime to begin a session, as its streaming library reports it.
pub(super) fn runtime_error(e: &CriError) -> Reply {
    let status = match e.outcome {
        Outcome::NotFound => StatusCode::NOT_FOUND,
        Outcome::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    };
    let mut reply = service_error(status, e.rpc_text());
    if status == StatusCode::TOO_MANY_REQUESTS {
        // A token of the runtime's lives a minute.
        reply.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("60"));
    }
    reply
}

fn no_streams() -> Reply {
    service_error(StatusCode::BAD_REQUEST, "you must specify at least 1 of stdin, stdout, stderr")
}

/// The ends of a session's streams that the client wants; None: no stream at all.
fn ends(parameters: &[(String, String)]) -> Option<Ends> {
    let on = |key: &str| first(parameters, key) == Some("1");
    let tty = on("tty");
    // A terminal has one output only.
    let ends = Ends { stdin: on("input"), stdout: on("output"), stderr: on("error") && !tty, tty };
    (ends.stdin || ends.stdout || ends.stderr).then_some(ends)
}

/// The ports of a port-forward by WebSocket; by SPDY each stream names its own.
fn ports(headers: &HeaderMap, parameters: &[(String, String)]) -> Result<Vec<i32>, String> {
    if !websocket::asked_for(headers) || websocket::offers(headers, websocket::TUNNEL) {
        return Ok(Vec::new());
    }
    let values: Vec<&str> = parameters.iter().filter(|(k, _)| k == "port").map(|(_, v)| v.as_str()).collect();
    if values.is_empty() {
        return Err("query parameter \"port\" is required".to_owned());
    }
    let mut ports = Vec::new();
    for text in values.iter().flat_map(|v| v.split(',')) {
        if text.is_empty() {
            return Err("query parameter \"port\" cannot be empty".to_owned());
        }
        let plain = text.bytes().all(|b| b.is_ascii_digit());
        match text.parse::<u16>() {
            Ok(0) => return Err("port \"0\" must be > 0".to_owned()),
            Ok(port) if plain => ports.push(i32::from(port)),
            _ => {
                let why = if plain { "value out of range" } else { "invalid syntax" };
                return Err(format!("unable to parse {text:?} as a port: strconv.ParseUint: parsing {text:?}: {why}"));
            }
        }
    }
    Ok(ports)
}

/// What a session is for, as metrics name it.
fn subresource(path: &str) -> &'static str {
    match path.trim_start_matches('/').split('/').next() {
        Some("exec") => "exec",
        Some("attach") => "attach",
        _ => "portforward",
    }
}
