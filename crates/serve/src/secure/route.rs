//! Paths and queries of the kubelet's port: what a request is for, without looking at anything but itself. The two forms of 404, the redirects
//! and the order of checks are those of Go's net/http and go-restful, recorded from the Go kubelet.

use http::Method;
use percent_encoding::percent_decode_str;

/// What a request is for, or what is wrong with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    /// To be asked for by this path; before anybody is asked who they are.
    Redirect(String),
    /// No such path; neither.
    Unknown,
    /// Everything else is for those who may.
    Known(Known),
}

/// A path that is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Known {
    /// Health, metrics, the list of pods: as on the read-only port.
    Page,
    /// `/runningpods/`
    RunningPods,
    /// `/configz`
    Configz,
    /// `/flagz`
    Flagz,
    /// `/statusz`
    Statusz,
    /// `/logs/PATH`; decoded.
    SystemLogs(String),
    /// `/debug/pprof/NAME`
    Profile(String),
    /// `/debug/flags/v`
    Verbosity,
    /// `/debug/pods`
    PodsPage,
    /// `/checkpoint/NAMESPACE/POD/CONTAINER`
    Checkpoint(Target),
    /// `/containerLogs/NAMESPACE/POD/CONTAINER`
    Logs(Target),
    /// `/run/…`
    Run(Target),
    /// `/exec/…`
    Exec(Target),
    /// `/attach/…`
    Attach(Target),
    /// `/portForward/NAMESPACE/POD`; the container is empty.
    PortForward(Target),
    /// Below a known root, but nothing is there.
    NoPage,
    /// Another method is needed; these are allowed.
    Method(&'static str),
    /// What leads here is off; in the words to answer.
    Disabled(&'static str),
}

/// Which handlers are on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handlers {
    /// `enableDebuggingHandlers`; without it, none of the others is.
    pub debugging: bool,
    /// `enableSystemLogHandler`
    pub system_logs: bool,
    /// `enableSystemLogQuery` and gate NodeLogQuery
    pub log_query: bool,
    /// `enableProfilingHandler`
    pub profiling: bool,
    /// `enableDebugFlagsHandler`
    pub debug_flags: bool,
    /// Gate ContainerCheckpoint
    pub checkpoint: bool,
    /// Gate ComponentFlagz
    pub flagz: bool,
    /// Gate ComponentStatusz
    pub statusz: bool,
}

/// Which container. A UID in the path is taken and not looked at, as in Go: names are unique on a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) namespace: String,
    pub(crate) pod: String,
    pub(crate) container: String,
}

impl Target {
    fn new(namespace: &str, pod: &str, container: &str) -> Self {
        Self { namespace: namespace.to_owned(), pod: pod.to_owned(), container: container.to_owned() }
    }
}

const DEBUGGING_OFF: &str = "Debug endpoints are disabled.";
/// Roots of the debugging handlers that are one path, not a tree, when asked for without the slash.
const TREES: [&str; 3] = ["/runningpods/", "/logs/", "/debug/pprof/"];
/// Roots of the debugging handlers that lead into containers.
const SERVICES: [&str; 5] = ["/run/", "/exec/", "/attach/", "/portForward/", "/containerLogs/"];

/// What a request is for. `path` is as it was sent.
pub(crate) fn route(method: &Method, path: &str, query: Option<&str>, on: &Handlers) -> Route {
    let redirect = |to: &str| {
        Route::Redirect(match query {
            Some(query) => format!("{to}?{query}"),
            None => to.to_owned(),
        })
    };
    let clean = clean(path);
    if clean != path && !path.is_empty() {
        return redirect(&clean);
    }
    let path = decode(path);
    let debugging = on.debugging;
    let is_root = |tree: &str| tree.strip_suffix('/') == Some(path.as_str());
    let checkpoints = debugging && on.checkpoint;
    if path == "/stats"
        || TREES.iter().any(|t| is_root(t))
        || (!debugging && SERVICES.iter().any(|t| is_root(t)))
        || (checkpoints && path == "/checkpoint")
    {
        return redirect(&format!("{path}/"));
    }
    let only = |wanted: Method, known: Known| match *method == wanted {
        true => known,
        false => Known::Method(if wanted == Method::GET { "GET" } else { "POST" }),
    };
    let get = |known: Known| only(Method::GET, known);
    Route::Known(match path.as_str() {
        "/healthz" | "/healthz/ping" | "/healthz/log" | "/healthz/syncloop" | "/metrics" | "/metrics/slis"
        | "/metrics/cadvisor" | "/metrics/resource" | "/metrics/probes" | "/stats/summary" | "/pods" | "/pods/" => {
            Known::Page
        }
        "/configz" if debugging => Known::Configz,
        "/flagz" if debugging && on.flagz => Known::Flagz,
        "/statusz" if debugging && on.statusz => Known::Statusz,
        "/debug/flags/v" if debugging && !on.debug_flags => Known::Disabled("flags endpoint is disabled."),
        "/debug/flags/v" if debugging => Known::Verbosity,
        "/debug/pods" if debugging => get(Known::PodsPage),
        "/runningpods/" if debugging => get(Known::RunningPods),
        _ if path.starts_with("/pods/") || path.starts_with("/stats/") => Known::NoPage,
        _ => {
            let root = |tree: &&&str| path.starts_with(**tree) || tree.strip_suffix('/') == Some(path.as_str());
            if let Some(service) = SERVICES.iter().find(root) {
                if debugging { in_container(method, service, &path) } else { Known::Disabled(DEBUGGING_OFF) }
            } else if TREES.iter().any(|t| path.starts_with(t)) && !debugging {
                Known::Disabled(DEBUGGING_OFF)
            } else if let Some(file) = path.strip_prefix("/logs/") {
                if on.system_logs {
                    get(Known::SystemLogs(file.to_owned()))
                } else {
                    Known::Disabled("logs endpoint is disabled.")
                }
            } else if let Some(name) = path.strip_prefix("/debug/pprof/") {
                match name {
                    _ if !on.profiling => Known::Disabled("profiling endpoint is disabled."),
                    "" => Known::NoPage,
                    name => get(Known::Profile(name.to_owned())),
                }
            } else if let Some(rest) = path.strip_prefix("/checkpoint/").filter(|_| checkpoints) {
                match rest.strip_suffix('/').unwrap_or(rest).split('/').collect::<Vec<_>>()[..] {
                    [namespace, pod, container] if ![namespace, pod, container].contains(&"") => {
                        only(Method::POST, Known::Checkpoint(Target::new(namespace, pod, container)))
                    }
                    _ => Known::NoPage,
                }
            } else if path.starts_with("/runningpods/") {
                Known::NoPage
            } else {
                return Route::Unknown;
            }
        }
    })
}

fn in_container(method: &Method, service: &str, path: &str) -> Known {
    let rest = path.strip_prefix(service).unwrap_or_default();
    let parts: Vec<&str> = rest.strip_suffix('/').unwrap_or(rest).split('/').collect();
    if parts.iter().any(|p| p.is_empty()) {
        return Known::NoPage;
    }
    let target = |container: &str| Target::new(parts[0], parts[1], container);
    let streams = |known: Known| match *method {
        Method::GET | Method::POST => known,
        _ => Known::Method("GET, POST"),
    };
    match (service, parts.as_slice()) {
        ("/containerLogs/", [_, _, c]) => match *method {
            Method::GET => Known::Logs(target(c)),
            _ => Known::Method("GET"),
        },
        ("/run/", [_, _, c] | [_, _, _, c]) => match *method {
            Method::POST => Known::Run(target(c)),
            _ => Known::Method("POST"),
        },
        ("/exec/", [_, _, c] | [_, _, _, c]) => streams(Known::Exec(target(c))),
        ("/attach/", [_, _, c] | [_, _, _, c]) => streams(Known::Attach(target(c))),
        ("/portForward/", [_, _] | [_, _, _]) => streams(Known::PortForward(target(""))),
        _ => Known::NoPage,
    }
}

/// The path without empty parts, `.` and `..`, as net/http's mux wants it; a slash at the end stays.
fn clean(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    let mut clean = format!("/{}", parts.join("/"));
    if path.ends_with('/') && clean.len() > 1 {
        clean.push('/');
    }
    clean
}

/// The path that is meant; also what authorization goes by, so that both see the same.
pub(crate) fn decode(path: &str) -> String {
    percent_decode_str(path).decode_utf8_lossy().into_owned()
}

/// The parameters of a query. Pairs that cannot be decoded are left out, as by Go.
pub(crate) fn parameters(query: Option<&str>) -> Vec<(String, String)> {
    let decode = |text: &str| {
        let bytes = text.as_bytes();
        let whole = bytes
            .iter()
            .enumerate()
            .filter(|(_, b)| **b == b'%')
            .all(|(at, _)| bytes.get(at + 1..at + 3).is_some_and(|hex| hex.iter().all(u8::is_ascii_hexdigit)));
        whole.then(|| decode(&text.replace('+', " ")))
    };
    let pairs = query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty() && !pair.contains(';'));
    pairs
        .filter_map(|pair| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            Some((decode(key)?, decode(value)?))
        })
        .collect()
}

/// The first value of a parameter.
pub(crate) fn first<'a>(parameters: &'a [(String, String)], key: &str) -> Option<&'a str> {
    parameters.iter().find(|(k, _)| k == key).map(|(_, v)| v.as_str())
}
