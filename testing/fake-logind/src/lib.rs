//! A stand-in for logind, and for the part of systemd that passes signals on to it, on a bus of its own. It needs the program `dbus-daemon`.
#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::StreamExt;
use zbus::message::Type;
use zbus::{Connection, MessageStream, OwnedFd, Variant};

const SERVICE: &str = "org.freedesktop.login1";
const PATH: &str = "/org/freedesktop/login1";

/// A bus; it ends with the value.
#[derive(Debug)]
pub struct Bus {
    daemon: Child,
    address: String,
    _dir: tempfile::TempDir,
}

impl Bus {
    /// Starts a bus on which anybody may do anything; None, with a word about it: there is no `dbus-daemon` here.
    ///
    /// # Panics
    /// The daemon is there but does not come up.
    pub fn start() -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("bus.conf");
        let text = format!(
            "<busconfig><type>system</type><listen>unix:dir={}</listen><auth>EXTERNAL</auth><policy context=\"default\">\
             <allow send_destination=\"*\"/><allow receive_sender=\"*\"/><allow own=\"*\"/><allow user=\"*\"/></policy></busconfig>",
            dir.path().display()
        );
        std::fs::write(&config, text).unwrap();
        let mut command = Command::new("dbus-daemon");
        command.arg("--nofork").arg("--print-address").arg(format!("--config-file={}", config.display()));
        let Ok(mut daemon) = command.stdout(Stdio::piped()).spawn() else {
            eprintln!("skipped: there is no dbus-daemon");
            return None;
        };
        let mut address = String::new();
        BufReader::new(daemon.stdout.take().unwrap()).read_line(&mut address).unwrap();
        Some(Self { daemon, address: address.trim().to_owned(), _dir: dir })
    }

    /// Its D-Bus address.
    pub fn address(&self) -> &str {
        &self.address
    }
}

impl Drop for Bus {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

#[derive(Debug, Default)]
struct State {
    delay_seconds: u64,
    preparing: bool,
    asked: Vec<String>,
    /// Our end of each lock.
    locks: Vec<UnixStream>,
}

type Shared = Arc<Mutex<State>>;

fn lock(state: &Shared) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Answers the calls that come to this connection, until the bus goes.
async fn serve(bus: Connection, mut calls: MessageStream, state: Shared, drop_in: PathBuf) {
    while let Some(Ok(call)) = calls.next().await {
        let header = call.header();
        if call.message_type() != Type::MethodCall {
            continue;
        }
        let member = header.member().map(|m| m.as_str().to_owned()).unwrap_or_default();
        let answered = match member.as_str() {
            "Get" => {
                let body = call.body();
                let (_, name): (String, String) = body.deserialize().unwrap();
                let value = match name.as_str() {
                    "InhibitDelayMaxUSec" => Variant::new(lock(&state).delay_seconds * 1_000_000),
                    _ => Variant::new(lock(&state).preparing),
                };
                bus.reply(&header, &value).await
            }
            "Inhibit" => {
                let body = call.body();
                let (what, who, _, mode): (String, String, String, String) = body.deserialize().unwrap();
                let (ours, theirs) = UnixStream::pair().unwrap();
                {
                    let mut state = lock(&state);
                    state.asked.push(format!("{what} {who} {mode}"));
                    state.locks.push(ours);
                }
                bus.reply(&header, &OwnedFd::from(std::os::fd::OwnedFd::from(theirs))).await
            }
            "KillUnit" => {
                let body = call.body();
                let (unit, who, signal): (String, String, i32) = body.deserialize().unwrap();
                let text = std::fs::read_to_string(&drop_in).unwrap();
                let value = text.lines().find_map(|l| l.strip_prefix("InhibitDelayMaxSec=")).unwrap();
                {
                    let mut state = lock(&state);
                    state.delay_seconds = value.parse().unwrap();
                    state.asked.push(format!("{unit} {who} {signal}"));
                }
                bus.reply(&header, &()).await
            }
            other => bus.reply_error(&header, "org.freedesktop.DBus.Error.UnknownMethod", &other).await,
        };
        answered.unwrap();
    }
}

/// logind on a bus.
#[derive(Debug)]
pub struct FakeLogind {
    state: Shared,
    served: Connection,
}

impl FakeLogind {
    /// Takes its name on the bus. It waits `delay_seconds` for locks, until it is told to read its configuration from `drop_in`.
    ///
    /// # Panics
    /// The bus does not take it.
    pub async fn on(bus: &Bus, delay_seconds: u64, drop_in: &Path) -> Self {
        let state = Shared::default();
        lock(&state).delay_seconds = delay_seconds;
        let served = zbus::connection::Builder::address(bus.address()).build().await.unwrap();
        let calls = MessageStream::from(&served);
        tokio::spawn(serve(served.clone(), calls, state.clone(), drop_in.to_owned()));
        for name in [SERVICE, "org.freedesktop.systemd1"] {
            served.request_name(name).await.unwrap();
        }
        Self { state, served }
    }

    /// Begins a shutdown, or calls it off.
    ///
    /// # Panics
    /// The bus is gone.
    pub async fn shut_down(&self, start: bool) {
        lock(&self.state).preparing = start;
        let manager = "org.freedesktop.login1.Manager";
        self.served.emit_signal(None::<&str>, PATH, manager, "PrepareForShutdown", &start).await.unwrap();
    }

    /// What it was asked since the last call: `WHAT WHO MODE` of locks, `UNIT WHO SIGNAL` of signals.
    pub fn asked(&self) -> Vec<String> {
        std::mem::take(&mut lock(&self.state).asked)
    }

    /// How many locks are held.
    pub fn held(&self) -> usize {
        lock(&self.state).locks.iter().filter(|lock| (&mut &**lock).write_all(b"?").is_ok()).count()
    }

    /// Leaves the bus.
    ///
    /// # Panics
    /// The bus is gone.
    pub async fn leave(self) {
        self.served.release_name(SERVICE).await.unwrap();
    }
}
