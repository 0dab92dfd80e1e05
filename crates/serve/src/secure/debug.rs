//! `/debug/flags/v` and `/debug/pprof/`: the log's verbosity, and what this program can tell of itself.
//!
//! Go's profiles come from Go's runtime. What they are asked for is answered here by what the kernel, the allocator and tokio count, as text:
//!
//! | name | |
//! |---|---|
//! | `goroutine`, `threadcreate` | tasks by number, threads with their state and where they wait in the kernel |
//! | `heap`, `allocs` | the allocator's figures and the process's memory by kind |
//! | `profile?seconds=N` | processor time of each thread over N seconds (30) |
//! | `cmdline`, `symbol` | as Go's; there are no symbols |
//!
//! `trace`, `block` and `mutex` are unknown profiles.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use http::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use http::{Method, StatusCode};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use telemetry::klog;
use tokio_util::sync::CancellationToken;

use super::route::first;
use crate::reply::{Reply, error, nosniff, text};

/// Longer than any number.
const BODY: usize = 64;
/// For a client to send it.
const BODY_TIME: Duration = Duration::from_secs(10);
/// Of a profile; Go's default is 30 s.
const MAX_SECONDS: u64 = 600;

/// `PUT /debug/flags/v`
pub(crate) async fn verbosity(method: &Method, body: Incoming, log: Option<&klog::Handle>) -> Reply {
    let plain = |mut reply: Reply| {
        reply.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
        nosniff(reply)
    };
    if *method != Method::PUT {
        return plain(error(StatusCode::NOT_ACCEPTABLE, "unsupported http method"));
    }
    let Ok(Ok(body)) = tokio::time::timeout(BODY_TIME, Limited::new(body, BODY).collect()).await else {
        return plain(error(StatusCode::BAD_REQUEST, "error reading request body: too long"));
    };
    let body = body.to_bytes();
    let level = String::from_utf8_lossy(&body);
    match parse_level(&level) {
        Ok(number) => {
            if let Some(log) = log {
                log.set_verbosity(number);
            }
            plain(error(StatusCode::OK, &format!("successfully set klog.logging.verbosity to {level}")))
        }
        Err(why) => plain(error(StatusCode::BAD_REQUEST, &format!("strconv.ParseUint: parsing {level:?}: {why}"))),
    }
}

fn parse_level(text: &str) -> Result<i32, &'static str> {
    if text.is_empty() || !text.bytes().all(|b| b.is_ascii_digit()) {
        return Err("invalid syntax");
    }
    text.parse().map_err(|_| "value out of range")
}

/// `GET /debug/pprof/NAME`; `stop` cuts a profile short.
pub(crate) async fn profile(name: &str, parameters: &[(String, String)], stop: &CancellationToken) -> Reply {
    let page = match name {
        "cmdline" => std::env::args_os().map(|a| a.to_string_lossy().into_owned()).collect::<Vec<_>>().join("\0"),
        "symbol" => "num_symbols: 0\n".to_owned(),
        "goroutine" | "threadcreate" => {
            let tasks = tokio::runtime::Handle::current().metrics();
            let (alive, workers, queued) = (tasks.num_alive_tasks(), tasks.num_workers(), tasks.global_queue_depth());
            blocking(move || {
                let threads = threads();
                let mut page = format!(
                    "tasks: {alive} alive, {queued} queued, on {workers} threads\nthreads: {}\n\n",
                    threads.len()
                );
                page += "TID STATE WAITS-IN CPU-SECONDS NAME\n";
                for (id, t) in threads {
                    let _ = writeln!(page, "{id} {} {} {:.2} {}", t.state, t.wait, t.seconds, t.name);
                }
                page
            })
            .await
        }
        "heap" | "allocs" => blocking(heap).await,
        "profile" => {
            let seconds = first(parameters, "seconds").and_then(|s| s.parse().ok()).filter(|s| *s > 0).unwrap_or(30);
            let seconds = u64::min(seconds, MAX_SECONDS);
            let before = blocking(threads).await;
            tokio::select! {
                () = tokio::time::sleep(Duration::from_secs(seconds)) => {}
                () = stop.cancelled() => {}
            }
            let after = blocking(threads).await;
            let mut page = format!("processor time over {seconds} s, by thread\n\nSECONDS TID NAME\n");
            let used = |(id, t): (u32, Thread)| (t.seconds - before.get(&id).map_or(0.0, |b| b.seconds), id, t.name);
            let mut used: Vec<_> = after.into_iter().map(used).collect();
            used.sort_by(|a, b| b.0.total_cmp(&a.0));
            for (seconds, id, name) in used {
                let _ = writeln!(page, "{seconds:.2} {id} {name}");
            }
            page
        }
        _ => {
            let mut reply = error(StatusCode::NOT_FOUND, "Unknown profile");
            reply.headers_mut().insert(HeaderName::from_static("x-go-pprof"), HeaderValue::from_static("1"));
            return reply;
        }
    };
    nosniff(text(page))
}

/// Reads /proc on a thread where that may block; nothing when that thread fails.
async fn blocking<T: Default + Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work).await.unwrap_or_default()
}

/// One thread of this process.
#[derive(Debug, Default)]
struct Thread {
    name: String,
    state: String,
    wait: String,
    /// Processor time used so far.
    seconds: f64,
}

fn threads() -> BTreeMap<u32, Thread> {
    let tick = rustix::param::clock_ticks_per_second() as f64;
    let read = |id: u32| {
        let dir = format!("/proc/self/task/{id}");
        let stat = std::fs::read_to_string(format!("{dir}/stat")).ok()?;
        let (head, rest) = stat.rsplit_once(')')?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        // State is field 3, utime 14, stime 15 (proc_pid_stat(5)).
        let ticks: f64 = [11, 12].iter().filter_map(|i| fields.get(*i)?.parse::<f64>().ok()).sum();
        let wait = std::fs::read_to_string(format!("{dir}/wchan")).unwrap_or_default();
        let name = head.split_once('(').map_or("", |(_, name)| name).to_owned();
        let state = fields.first().copied().unwrap_or("?").to_owned();
        let wait = if wait.is_empty() || wait == "0" { "-".to_owned() } else { wait };
        Some((id, Thread { name, state, wait, seconds: ticks / tick }))
    };
    let entries = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    entries.filter_map(|e| e.file_name().to_str()?.parse().ok()).filter_map(read).collect()
}

fn heap() -> String {
    let mut page = String::new();
    if let Some(a) = host::memory::allocator() {
        let _ = writeln!(
            page,
            "allocator: {} bytes in use in arenas, {} free there, {} mapped singly in {} pieces\n",
            a.in_use, a.free, a.mapped, a.mappings
        );
    }
    for file in ["/proc/self/status", "/proc/self/smaps_rollup"] {
        let lines = std::fs::read_to_string(file).unwrap_or_default();
        let _ = writeln!(page, "{file}");
        for line in lines.lines().filter(|l| l.ends_with(" kB") && !l.ends_with(" 0 kB")) {
            let _ = writeln!(page, "{line}");
        }
        page.push('\n');
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels() {
        for (text, expected) in [
            ("5", Ok(5)),
            ("0", Ok(0)),
            ("", Err("invalid syntax")),
            ("+5", Err("invalid syntax")),
            ("-1", Err("invalid syntax")),
            ("x", Err("invalid syntax")),
            ("99999999999", Err("value out of range")),
        ] {
            assert_eq!(parse_level(text), expected, "{text}");
        }
    }

    #[test]
    fn this_process_is_seen() {
        let threads = threads();
        let own = &threads[&(rustix::thread::gettid().as_raw_nonzero().get() as u32)];
        assert!(own.state == "R" && !own.name.is_empty(), "{own:?}");
        assert!(heap().contains("VmRSS"));
    }
}
