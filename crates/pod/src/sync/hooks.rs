//! Lifecycle handlers: postStart and preStop as exec, httpGet, sleep (LifecycleHandler of the API).
//!
//! Dropping a handler's future cancels it: an exec call is cancelled at the runtime, an HTTP connection is closed. That is safe, since a
//! handler's effects are the container's own.

use std::time::Duration;

use cri::port::RuntimeMutator;
use decide::config::go_text::quote;
use model::api::{Container, HTTPGetAction, IntOrString, LifecycleHandler};
use telemetry::metrics::Metrics;

use crate::http::{Get, GetError, Tls};

/// How much of an answer is read, bytes.
const BODY_MAX: usize = 10 * 1024;

/// What a handler needs besides itself.
pub struct HookContext<'a> {
    /// The runtime, for exec.
    pub runtime: &'a dyn RuntimeMutator,
    /// Counts sleeps that are cut short.
    pub metrics: &'a Metrics,
    /// CRI id of the container.
    pub container_id: &'a str,
    /// Container and pod as messages name them, from [`place`].
    pub place: String,
    /// Its spec, for named ports.
    pub spec: Option<&'a Container>,
    /// The pod's address, the default host of httpGet.
    pub pod_ip: Option<&'a str>,
    /// Told when HTTPS failed and HTTP worked: the message of event LifecycleHTTPFallback.
    pub fell_back: &'a (dyn Fn(&str) + Send + Sync),
}

/// How Go's messages name a container; `pod`: `NAME_NAMESPACE(UID)`.
pub fn place(container: &str, pod: &str) -> String {
    format!("for Container {} in Pod {}", quote(container), quote(pod))
}

/// Counts a sleep that is dropped before its end.
struct CutShort<'a>(Option<&'a Metrics>);

impl Drop for CutShort<'_> {
    fn drop(&mut self) {
        if let Some(metrics) = self.0 {
            metrics.sleep_terminated_early.inc();
        }
    }
}

/// Runs one handler to its end.
///
/// # Errors
/// Go's message: what went wrong, with the output that the handler gave.
pub async fn run(hook: &LifecycleHandler, context: &HookContext<'_>) -> Result<(), String> {
    let place = &context.place;
    if let Some(exec) = &hook.exec {
        let command = exec.command.clone().unwrap_or_default();
        let words = command.join(" ");
        let (error, said) = match context.runtime.exec_sync(context.container_id, command, None).await {
            Ok(output) if output.exit_code == 0 => return Ok(()),
            Ok(output) => {
                let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
                let said = String::from_utf8_lossy(&output.stdout).into_owned() + &stderr;
                (format!("command '{words}' exited with {}: {stderr}", output.exit_code), said)
            }
            Err(e) => (e.rpc_text(), String::new()),
        };
        let said = quote(&said);
        return Err(format!("Exec lifecycle hook ([{words}]) {place} failed - error: {error}, message: {said}"));
    }
    if let Some(get) = &hook.http_get {
        let path = get.path.as_deref().unwrap_or_default();
        let failed = |error| format!("HTTP lifecycle hook ({path}) {place} failed - error: {error}");
        return http_get(get, context).await.map_err(failed);
    }
    if let Some(sleep) = &hook.sleep {
        let mut cut = CutShort(Some(context.metrics));
        tokio::time::sleep(Duration::from_secs(sleep.seconds.max(0).unsigned_abs())).await;
        cut.0 = None;
        return Ok(());
    }
    Err("the handler names neither exec, httpGet nor sleep".to_owned())
}

/// A port of the API as a number: itself, or that of the container's port of this name.
///
/// # Errors
/// Names the port that does not exist or is out of range.
pub fn resolve_port(port: &IntOrString, spec: Option<&Container>) -> Result<u16, String> {
    let number = match port {
        IntOrString::Int(n) => *n,
        IntOrString::String(name) => {
            let ports = spec.and_then(|c| c.ports.as_ref()).into_iter().flatten();
            match ports.into_iter().find(|p| p.name.as_deref() == Some(name)) {
                Some(found) => found.container_port,
                None => name.parse().map_err(|_| format!("couldn't find port: {name:?}"))?,
            }
        }
    };
    u16::try_from(number).ok().filter(|p| *p > 0).ok_or_else(|| format!("invalid port number: {number}"))
}

async fn http_get(get: &HTTPGetAction, context: &HookContext<'_>) -> Result<(), String> {
    let port = resolve_port(&get.port, context.spec)?;
    let host = match get.host.as_deref().filter(|h| !h.is_empty()) {
        Some(host) => host,
        None => context.pod_ip.ok_or("failed to find networking container: the pod has no address")?,
    };
    let tls = get.scheme.as_deref().is_some_and(|s| s.eq_ignore_ascii_case("https"));
    let request = Get {
        host,
        port,
        tls: if tls { Tls::Unverified } else { Tls::Off },
        path: get.path.as_deref().unwrap_or_default(),
        agent: "kube-lifecycle/1.36",
        headers: get
            .http_headers
            .as_deref()
            .unwrap_or_default()
            .iter()
            .map(|h| (h.name.as_str(), h.value.as_str()))
            .collect(),
        body_max: BODY_MAX,
    };
    // Any answer will do, whatever its status.
    match request.follow(None).await {
        Ok(_) => Ok(()),
        Err(GetError::NotTls(why)) => {
            let plain = Get { tls: Tls::Off, headers: without_authorization(&request.headers), ..request };
            match plain.follow(None).await {
                Ok(_) => {
                    (context.fell_back)(&format!(
                        "request to HTTPS lifecycle hook {} got HTTP response, retry with HTTP succeeded",
                        plain.authority()
                    ));
                    Ok(())
                }
                Err(_) => Err(why),
            }
        }
        Err(e) => Err(e.to_string()),
    }
}

/// What must not be told to whoever listens without encryption.
fn without_authorization<'a>(headers: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    headers.iter().copied().filter(|(name, _)| !name.eq_ignore_ascii_case("authorization")).collect()
}
