//! One probe attempt: exec, httpGet, tcpSocket, grpc, with the rules that probes have and hooks do not.

use std::time::Duration;

use cri::port::{Outcome, RuntimeMutator};
use model::api::{Container, ExecAction, GRPCAction, HTTPGetAction, Probe};

use crate::http::{Get, GetError, Tls};
use crate::sync::hooks::resolve_port;

/// How much of an answer or of a command's output counts, bytes.
const OUTPUT_MAX: usize = 10 * 1024;
/// How many redirects on the same host are followed.
const REDIRECTS: usize = 10;

/// The container that is probed.
pub(super) struct Target {
    pub(super) container_id: String,
    pub(super) spec: Container,
    pub(super) pod_ip: Option<String>,
}

/// What a probe found.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// Healthy.
    Success,
    /// Healthy, with something to say.
    Warning(String),
    /// Unhealthy, and why.
    Failure(String),
}

/// Makes one attempt within the timeout.
///
/// # Errors
/// The attempt could not be made, which says nothing about the container.
pub(super) async fn run(
    probe: &Probe,
    target: &Target,
    runtime: &dyn RuntimeMutator,
    timeout: Duration,
) -> Result<Answer, String> {
    if let Some(exec) = &probe.exec {
        return self::exec(exec, target, runtime, timeout).await;
    }
    let attempt = async {
        if let Some(get) = &probe.http_get {
            http_get(get, target).await
        } else if let Some(tcp) = &probe.tcp_socket {
            let port = resolve_port(&tcp.port, Some(&target.spec))?;
            let host = host(tcp.host.as_deref(), target)?;
            Ok(match tokio::net::TcpStream::connect((host, port)).await {
                Ok(_) => Answer::Success,
                Err(e) => Answer::Failure(format!("dial tcp {host}:{port}: {e}")),
            })
        } else if let Some(grpc) = &probe.grpc {
            self::grpc(grpc, target).await
        } else {
            Err("missing probe handler".to_owned())
        }
    };
    tokio::time::timeout(timeout, attempt)
        .await
        .unwrap_or_else(|_| Ok(Answer::Failure(format!("no answer within {} s", timeout.as_secs()))))
}

async fn exec(
    exec: &ExecAction,
    target: &Target,
    runtime: &dyn RuntimeMutator,
    timeout: Duration,
) -> Result<Answer, String> {
    let command = exec.command.clone().unwrap_or_default();
    match runtime.exec_sync(&target.container_id, command.clone(), Some(timeout)).await {
        Ok(output) if output.exit_code == 0 => Ok(Answer::Success),
        Ok(output) => {
            let mut said = [output.stdout, output.stderr].concat();
            said.truncate(OUTPUT_MAX);
            Ok(Answer::Failure(String::from_utf8_lossy(&said).into_owned()))
        }
        // gRPC DeadlineExceeded: the command did not end in time, and that is the container's fault.
        Err(e) if e.code == 4 => Ok(Answer::Failure(format!(
            "command timed out: \"{}\" timed out after {}s",
            command.join(" "),
            timeout.as_secs()
        ))),
        Err(e) if e.outcome == Outcome::Failed && e.message.contains("timeout") => Ok(Answer::Failure(e.message)),
        Err(e) => Err(e.to_string()),
    }
}

fn host<'a>(asked: Option<&'a str>, target: &'a Target) -> Result<&'a str, String> {
    asked
        .filter(|h| !h.is_empty())
        .or(target.pod_ip.as_deref())
        .ok_or_else(|| "the pod has no address to probe".to_owned())
}

async fn http_get(get: &HTTPGetAction, target: &Target) -> Result<Answer, String> {
    let port = resolve_port(&get.port, Some(&target.spec))?;
    let host = host(get.host.as_deref(), target)?;
    let tls = get.scheme.as_deref().is_some_and(|s| s.eq_ignore_ascii_case("https"));
    let mut path = get.path.clone().unwrap_or_default();
    let headers = get.http_headers.as_deref().unwrap_or_default();
    for _ in 0..=REDIRECTS {
        let request = Get {
            host,
            port,
            tls: if tls { Tls::Unverified } else { Tls::Off },
            path: &path,
            agent: "kube-probe/1.36",
            headers: headers.iter().map(|h| (h.name.as_str(), h.value.as_str())).collect(),
            body_max: OUTPUT_MAX,
        };
        let answer = match request.send().await {
            Ok(answer) => answer,
            Err(GetError::Invalid(reason)) => return Err(reason),
            Err(e) => return Ok(Answer::Failure(e.to_string())),
        };
        let redirect = matches!(answer.status, 301 | 302 | 303 | 307 | 308);
        let Some(location) = answer.location.as_deref().filter(|_| redirect) else {
            return Ok(if (200..400).contains(&answer.status) {
                Answer::Success
            } else {
                Answer::Failure(format!("HTTP probe failed with statuscode: {}", answer.status))
            });
        };
        let next: http::Uri = match location.parse() {
            Ok(uri) => uri,
            Err(e) => {
                return Ok(Answer::Failure(format!("Location {location:?} is not a URL: {e}")));
            }
        };
        // Another host is never contacted: that it is named counts as an answer.
        if !same_place(&next, host, port, tls) {
            return Ok(Answer::Warning(format!("Probe terminated redirects, Response body: {}", answer.text())));
        }
        path = next.path_and_query().map_or_else(|| "/".to_owned(), ToString::to_string);
    }
    Ok(Answer::Failure(format!("stopped after {REDIRECTS} redirects")))
}

/// True when a redirect stays at the probed scheme, host and port.
fn same_place(next: &http::Uri, host: &str, port: u16, tls: bool) -> bool {
    let Some(named) = next.host() else {
        return true;
    };
    let (scheme, default) = if tls { ("https", 443) } else { ("http", 80) };
    named.trim_matches(['[', ']']) == host
        && next.scheme_str().is_none_or(|s| s == scheme)
        && next.port_u16().unwrap_or(default) == port
}

async fn grpc(action: &GRPCAction, target: &Target) -> Result<Answer, String> {
    let port = u16::try_from(action.port).map_err(|_| format!("invalid port number: {}", action.port))?;
    let host = host(None, target)?;
    let service = action.service.clone().unwrap_or_default();
    Ok(match super::grpc::check(host, port, &service).await {
        Ok(super::grpc::Serving::Yes) => Answer::Success,
        Ok(super::grpc::Serving::No(status)) => {
            Answer::Failure(format!("service unhealthy (responded with \"{status}\")"))
        }
        Err(reason) => Answer::Failure(reason),
    })
}
