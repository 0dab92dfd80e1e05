//! One probe attempt: exec, httpGet, tcpSocket, grpc, with the rules that probes have and hooks do not.

use std::time::Duration;

use cri::port::{Outcome, RuntimeMutator};
use decide::config::expand::expand;
use decide::config::go_text::quote;
use decide::text::go_duration;
use model::api::{Container, ExecAction, GRPCAction, HTTPGetAction, Probe};

use crate::http::{Get, GetAnswer, GetError, Tls, dial_error};
use crate::sync::hooks::resolve_port;

/// How much of an answer or of a command's output counts, bytes.
const OUTPUT_MAX: usize = 10 * 1024;

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
        self::exec(exec, target, runtime, timeout).await
    } else if let Some(get) = &probe.http_get {
        http_get(get, target, timeout).await
    } else if let Some(socket) = &probe.tcp_socket {
        let port = resolve_port(&socket.port, Some(&target.spec))?;
        let host = host(socket.host.as_deref(), target)?;
        let address = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
        let connect = tokio::net::TcpStream::connect((host, port));
        Ok(match tokio::time::timeout(timeout, connect).await {
            Ok(Ok(_)) => Answer::Success,
            Ok(Err(e)) => Answer::Failure(dial_error(&address, &e)),
            Err(_) => Answer::Failure(format!("dial tcp {address}: i/o timeout")),
        })
    } else if let Some(grpc) = &probe.grpc {
        self::grpc(grpc, target, timeout).await
    } else {
        Err(format!("missing probe handler for {}", target.spec.name))
    }
}

async fn exec(
    exec: &ExecAction,
    target: &Target,
    runtime: &dyn RuntimeMutator,
    timeout: Duration,
) -> Result<Answer, String> {
    let command = command(exec, &target.spec);
    match runtime.exec_sync(&target.container_id, command.clone(), Some(timeout)).await {
        Ok(output) if output.exit_code == 0 => Ok(Answer::Success),
        Ok(output) => {
            let mut said = [output.stdout, output.stderr].concat();
            said.truncate(OUTPUT_MAX);
            Ok(Answer::Failure(String::from_utf8_lossy(&said).into_owned()))
        }
        // gRPC DeadlineExceeded: the command did not end in time, and that is the container's fault.
        Err(e) if e.code == 4 => Ok(Answer::Failure(format!(
            "command timed out: {} timed out after {}",
            quote(&command.join(" ")),
            go_duration(timeout)
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

/// The command with references to variables that the spec gives a plain value.
fn command(exec: &ExecAction, spec: &Container) -> Vec<String> {
    let value = |name: &str| {
        let vars = spec.env.iter().flatten().rev();
        let mut vars = vars.filter(|v| v.name == name);
        vars.next().map(|v| v.value.clone().unwrap_or_default())
    };
    exec.command.iter().flatten().map(|word| expand(word, value)).collect()
}

async fn http_get(get: &HTTPGetAction, target: &Target, timeout: Duration) -> Result<Answer, String> {
    let port = resolve_port(&get.port, Some(&target.spec))?;
    let host = host(get.host.as_deref(), target)?;
    let tls = get.scheme.as_deref().is_some_and(|s| s.eq_ignore_ascii_case("https"));
    let headers = get.http_headers.as_deref().unwrap_or_default();
    let request = Get {
        host,
        port,
        tls: if tls { Tls::Unverified } else { Tls::Off },
        path: get.path.as_deref().unwrap_or_default(),
        agent: "kube-probe/1.36",
        headers: headers.iter().map(|h| (h.name.as_str(), h.value.as_str())).collect(),
        body_max: OUTPUT_MAX,
    };
    Ok(match request.follow(Some(timeout)).await {
        Ok(answer) => judge(&answer),
        Err(GetError::Invalid(reason)) => return Err(reason),
        Err(e) => Answer::Failure(e.to_string()),
    })
}

/// A status of 300 to 399 at the end of all redirects is success with a warning.
fn judge(answer: &GetAnswer) -> Answer {
    match answer.status {
        200..300 => Answer::Success,
        300..400 => Answer::Warning(format!("Probe terminated redirects, Response body: {}", answer.text())),
        status => Answer::Failure(format!("HTTP probe failed with statuscode: {status}")),
    }
}

async fn grpc(action: &GRPCAction, target: &Target, timeout: Duration) -> Result<Answer, String> {
    let port = u16::try_from(action.port).map_err(|_| format!("invalid port number: {}", action.port))?;
    let host = host(None, target)?;
    let service = action.service.clone().unwrap_or_default();
    Ok(match super::grpc::check(host, port, &service, timeout).await {
        Ok(super::grpc::Serving::Yes) => Answer::Success,
        Ok(super::grpc::Serving::No(status)) => {
            Answer::Failure(format!("service unhealthy (responded with \"{status}\")"))
        }
        Err(reason) => Answer::Failure(reason),
    })
}

#[cfg(test)]
#[path = "attempt_tests.rs"]
mod tests;
