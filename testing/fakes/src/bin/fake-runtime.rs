//! A fake runtime as a process of its own, for measuring what stands before it: `fake-runtime SOCKET`, until its input ends.
//!
//! It takes orders on its input, one a line, and answers each with one line:
//!
//! | order | what it does | answer |
//! |---|---|---|
//! | `running` | | the number of running containers |
//! | `exit FIRST COUNT MILLISECONDS` | ends the container of pod `pFIRST`, then that of the next, so far apart | how many ended |
//! | `calls` | forgets the calls so far | each method that was called, with its count |

use std::collections::{BTreeMap, HashMap};
use std::io::{self, BufRead, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use cri_api::v1::ContainerState;
use fakes::{FakeRuntime, Settings};
use jiff::Timestamp;

fn main() -> io::Result<()> {
    let usage = || io::Error::new(io::ErrorKind::InvalidInput, "usage: fake-runtime SOCKET");
    let socket = std::env::args_os().nth(1).ok_or_else(usage)?;
    let tasks = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let _inside = tasks.enter();
    let runtime =
        FakeRuntime::with_settings(0, Settings { epoch: Timestamp::now(), log_files: true, ..Settings::default() });
    let _server = fakes::serve(&runtime, Path::new(&socket))?;
    let mut out = io::stdout().lock();
    for line in io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let answer = match words.as_slice() {
            ["running"] => running(&runtime).to_string(),
            ["exit", numbers @ ..] => match numbers.iter().flat_map(|n| n.parse()).collect::<Vec<u64>>().as_slice() {
                [first, count, apart] => exit(&runtime, *first, *count, Duration::from_millis(*apart)).to_string(),
                _ => "exit takes three numbers".to_owned(),
            },
            ["calls"] => calls(&runtime),
            _ => format!("not an order: {line}"),
        };
        writeln!(out, "{answer}")?;
        out.flush()?;
    }
    Ok(())
}

fn running(runtime: &FakeRuntime) -> usize {
    runtime.states().iter().filter(|(_, state, _, _)| *state == ContainerState::ContainerRunning).count()
}

/// Ends the containers of those pods one after the other.
fn exit(runtime: &FakeRuntime, first: u64, count: u64, apart: Duration) -> u64 {
    let live: HashMap<String, String> = runtime
        .containers()
        .into_iter()
        .filter(|c| c.state() == ContainerState::ContainerRunning)
        .filter_map(|c| Some((c.labels.get("io.kubernetes.pod.name")?.clone(), c.id)))
        .collect();
    let mut ended = 0;
    let mut next = Instant::now();
    for n in first..first + count {
        if live.get(&format!("p{n}")).is_some_and(|id| runtime.exit(id, 0)) {
            ended += 1;
        }
        next += apart;
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    ended
}

/// How often each method was called.
fn calls(runtime: &FakeRuntime) -> String {
    let mut counts = BTreeMap::<&str, usize>::new();
    for call in runtime.calls() {
        *counts.entry(call.call).or_default() += 1;
    }
    runtime.forget_calls();
    let counts: Vec<String> = counts.iter().map(|(call, count)| format!("{call}={count}")).collect();
    counts.join(" ")
}
