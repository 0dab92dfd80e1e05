//! Probes and lifecycle hooks.

use model::api::{
    ExecAction, GRPCAction, HTTPGetAction, IntOrString, Lifecycle, LifecycleHandler, PodOS, Probe, SleepAction,
    TCPSocketAction,
};

use super::field::{Errors, Path};
use super::names;

/// Which probe; they have different rules.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProbeKind {
    Liveness,
    Readiness,
    Startup,
}

/// What a probe or a hook does.
#[derive(Default)]
struct Handler<'a> {
    exec: Option<&'a ExecAction>,
    http_get: Option<&'a HTTPGetAction>,
    tcp_socket: Option<&'a TCPSocketAction>,
    grpc: Option<&'a GRPCAction>,
    sleep: Option<&'a SleepAction>,
}

pub(crate) fn probe(e: &mut Errors, probe: Option<&Probe>, kind: ProbeKind, grace: Option<i64>, path: &Path) {
    let Some(p) = probe else { return };
    let does = Handler {
        exec: p.exec.as_ref(),
        http_get: p.http_get.as_ref(),
        tcp_socket: p.tcp_socket.as_ref(),
        grpc: p.grpc.as_ref(),
        sleep: None,
    };
    handler(e, &does, grace, path);
    for (field, value) in [
        ("initialDelaySeconds", p.initial_delay_seconds),
        ("timeoutSeconds", p.timeout_seconds),
        ("periodSeconds", p.period_seconds),
        ("successThreshold", p.success_threshold),
        ("failureThreshold", p.failure_threshold),
    ] {
        e.non_negative(&path.child(field), i64::from(value.unwrap_or(0)));
    }
    let own_grace = path.child("terminationGracePeriodSeconds");
    if let Some(value) = p.termination_grace_period_seconds.filter(|g| *g <= 0) {
        e.invalid(&own_grace, value, "must be greater than 0");
    }
    if kind == ProbeKind::Readiness {
        if let Some(value) = p.termination_grace_period_seconds {
            e.invalid(&own_grace, value, "must not be set for readinessProbes");
        }
    } else if p.success_threshold.unwrap_or(0) != 1 {
        e.invalid(&path.child("successThreshold"), p.success_threshold.unwrap_or(0), "must be 1");
    }
}

pub(crate) fn lifecycle(e: &mut Errors, l: &Lifecycle, grace: Option<i64>, os: Option<&PodOS>, path: &Path) {
    for (field, hook) in [("postStart", &l.post_start), ("preStop", &l.pre_stop)] {
        let Some(LifecycleHandler { exec, http_get, sleep, tcp_socket }) = hook else { continue };
        let does = Handler {
            exec: exec.as_ref(),
            http_get: http_get.as_ref(),
            tcp_socket: tcp_socket.as_ref(),
            grpc: None,
            sleep: sleep.as_ref(),
        };
        handler(e, &does, grace, &path.child(field));
    }
    if let Some(signal) = &l.stop_signal {
        let path = path.child("stopSignal");
        match os.map(|o| o.name.as_str()) {
            None => e.forbidden(&path, "may not be set for containers with empty `spec.os.name`"),
            Some("windows") => e.one_of(&path, signal, &["SIGKILL", "SIGTERM"]),
            Some("linux") => {
                let all = stop_signals();
                e.one_of(&path, signal, &all.iter().map(String::as_str).collect::<Vec<_>>());
            }
            Some(_) => {}
        }
    }
}

/// Signals of Linux, sorted.
fn stop_signals() -> Vec<String> {
    let mut all: Vec<String> =
        "ABRT ALRM BUS CHLD CLD CONT FPE HUP ILL INT IO IOT KILL PIPE POLL PROF PWR QUIT SEGV STKFLT STOP SYS TERM \
         TRAP TSTP TTIN TTOU URG USR1 USR2 VTALRM WINCH XCPU XFSZ RTMIN RTMAX"
            .split_whitespace()
            .map(|s| format!("SIG{s}"))
            .collect();
    all.extend((1..=15).map(|n| format!("SIGRTMIN+{n}")));
    all.extend((1..=14).map(|n| format!("SIGRTMAX-{n}")));
    all.sort();
    all
}

fn handler(e: &mut Errors, h: &Handler<'_>, grace: Option<i64>, path: &Path) {
    let mut found = 0;
    let mut first = |e: &mut Errors, field: &str, present: bool| {
        if !present {
            return false;
        }
        found += 1;
        if found > 1 {
            e.forbidden(&path.child(field), "may not specify more than 1 handler type");
        }
        found == 1
    };
    if first(e, "exec", h.exec.is_some())
        && let Some(exec) = h.exec
        && exec.command.as_ref().is_none_or(Vec::is_empty)
    {
        e.required(&path.child("exec").child("command"), "");
    }
    if first(e, "httpGet", h.http_get.is_some())
        && let Some(http) = h.http_get
    {
        http_get(e, http, &path.child("httpGet"));
    }
    if first(e, "tcpSocket", h.tcp_socket.is_some())
        && let Some(tcp) = h.tcp_socket
    {
        port(e, &tcp.port, &path.child("tcpSocket").child("port"));
    }
    if first(e, "grpc", h.grpc.is_some())
        && let Some(grpc) = h.grpc
    {
        port(e, &IntOrString::Int(grpc.port), &path.child("grpc").child("port"));
    }
    if first(e, "sleep", h.sleep.is_some())
        && let (Some(sleep), Some(grace)) = (h.sleep, grace)
        && !(0..=grace).contains(&sleep.seconds)
    {
        let detail = format!("must be non-negative and less than terminationGracePeriodSeconds ({grace})");
        e.invalid(&path.child("sleep"), sleep.seconds, &detail);
    }
    if found == 0 {
        e.required(path, "must specify a handler type");
    }
}

fn http_get(e: &mut Errors, http: &HTTPGetAction, path: &Path) {
    e.non_empty(&path.child("path"), http.path.as_deref().unwrap_or(""));
    port(e, &http.port, &path.child("port"));
    e.one_of(&path.child("scheme"), http.scheme.as_deref().unwrap_or(""), &["HTTP", "HTTPS"]);
    for header in http.http_headers.iter().flatten() {
        e.invalid_each(&path.child("httpHeaders"), &header.name, names::http_header(&header.name));
    }
}

fn port(e: &mut Errors, port: &IntOrString, path: &Path) {
    match port {
        IntOrString::Int(number) => {
            for message in names::port_number(*number) {
                e.invalid(path, *number, &message);
            }
        }
        IntOrString::String(name) => e.invalid_each(path, name, names::port_name(name)),
    }
}
