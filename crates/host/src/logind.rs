//! logind over D-Bus (`org.freedesktop.login1.Manager`): holding a shutdown of the machine up for a while.
//!
//! A delay lock is a file descriptor: closed, by whatever end of this process too, it holds nothing up any more. logind waits at most `InhibitDelayMaxSec`, which
//! is raised by a drop-in file. All calls have a deadline; the stream of events ends when the bus goes.

use std::path::PathBuf;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::BoxStream;
use zbus::message::Type;
use zbus::{Connection, MatchRule, Message, MessageStream, OwnedFd, Variant};

use crate::error::{Attempt, Failed, Result};

/// How long the bus, or who is on it, may take for an answer.
const ANSWER: Duration = Duration::from_secs(25);

const SERVICE: &str = "org.freedesktop.login1";
const PATH: &str = "/org/freedesktop/login1";
const MANAGER: &str = "org.freedesktop.login1.Manager";
/// Where logind finds more configuration.
const DROP_INS: &str = "/etc/systemd/logind.conf.d";
/// The Go kubelet's file there.
const DROP_IN: &str = "99-kubelet.conf";

/// Holds shutdowns up for as long as it is kept.
#[derive(Debug)]
pub struct InhibitorLock {
    _fd: OwnedFd,
}

/// A connection to logind.
#[derive(Clone, Debug)]
pub struct Logind {
    bus: Connection,
    drop_ins: PathBuf,
}

/// Gives it a deadline and says what was attempted.
async fn within<T>(what: &str, call: impl Future<Output = zbus::Result<T>>) -> Result<T> {
    match tokio::time::timeout(ANSWER, call).await {
        Ok(answer) => answer.map_err(|e| Failed::other(what, e.to_string())),
        Err(_) => Err(Failed::other(what, format!("no answer within {} s", ANSWER.as_secs()))),
    }
}

impl Logind {
    /// Connects to the bus at this D-Bus address (`unix:path=…`); None: the standard system bus.
    ///
    /// # Errors
    /// There is no bus.
    pub async fn connect(address: Option<&str>) -> Result<Self> {
        let builder = match address {
            Some(address) => zbus::connection::Builder::address(address),
            None => zbus::connection::Builder::system(),
        };
        let bus = within("connect to the system bus", async { builder.build().await }).await?;
        Ok(Self { bus, drop_ins: PathBuf::from(DROP_INS) })
    }

    /// With another directory for drop-ins.
    #[must_use]
    pub fn with_drop_ins(self, dir: PathBuf) -> Self {
        Self { drop_ins: dir, ..self }
    }

    async fn property(&self, name: &str) -> zbus::Result<Message> {
        let properties = Some("org.freedesktop.DBus.Properties");
        self.bus.call_method(Some(SERVICE), PATH, properties, "Get", &(MANAGER, name)).await
    }

    /// The longest time that logind waits for delay locks.
    ///
    /// # Errors
    /// logind does not answer.
    pub async fn max_delay(&self) -> Result<Duration> {
        let read = async {
            let answer = self.property("InhibitDelayMaxUSec").await?;
            let body = answer.body();
            body.deserialize::<Variant<'_>>()?.downcast::<u64>()
        };
        within("read InhibitDelayMaxUSec from logind", read).await.map(Duration::from_micros)
    }

    /// Whether a shutdown is under way.
    ///
    /// # Errors
    /// logind does not answer.
    pub async fn is_shutting_down(&self) -> Result<bool> {
        let read = async {
            let answer = self.property("PreparingForShutdown").await?;
            let body = answer.body();
            body.deserialize::<Variant<'_>>()?.downcast::<bool>()
        };
        within("read PreparingForShutdown from logind", read).await
    }

    /// Has logind wait as long as this from now on: writes the drop-in and lets logind read it. logind takes it up a moment later.
    ///
    /// # Errors
    /// The file cannot be written, or systemd does not pass the signal on.
    pub async fn set_max_delay(&self, delay: Duration) -> Result<()> {
        let file = self.drop_ins.join(DROP_IN);
        let content = format!("# Kubelet logind override\n[Login]\nInhibitDelayMaxSec={}\n", delay.as_secs());
        tokio::fs::create_dir_all(&self.drop_ins).await.on("create directory", &self.drop_ins)?;
        tokio::fs::write(&file, content).await.on("write", &file)?;
        let (systemd, path) = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1");
        let manager = Some("org.freedesktop.systemd1.Manager");
        const SIGHUP: i32 = 1;
        let body = ("systemd-logind.service", "all", SIGHUP);
        let signal = async { self.bus.call_method(Some(systemd), path, manager, "KillUnit", &body).await };
        within("have logind read its configuration", signal).await.map(drop)
    }

    /// Takes a delay lock on shutdowns.
    ///
    /// # Errors
    /// logind refuses or does not answer.
    pub async fn inhibit(&self) -> Result<InhibitorLock> {
        let take = async {
            let body = ("shutdown", "kubelet", "Kubelet needs time to handle node shutdown", "delay");
            let answer = self.bus.call_method(Some(SERVICE), PATH, Some(MANAGER), "Inhibit", &body).await?;
            let body = answer.body();
            body.deserialize::<OwnedFd>()
        };
        Ok(InhibitorLock { _fd: within("take an inhibitor lock from logind", take).await? })
    }

    /// True when a shutdown begins, false when it was called off. Ends with the bus, and when logind leaves it: its locks are gone then.
    ///
    /// # Errors
    /// The bus does not take the subscription.
    pub async fn shutdowns(&self) -> Result<BoxStream<'static, bool>> {
        let listen = async {
            let events = MatchRule::builder()
                .msg_type(Type::Signal)
                .sender(SERVICE)
                .interface(MANAGER)
                .member("PrepareForShutdown")
                .path(PATH)
                .build()?;
            let owner = MatchRule::builder()
                .msg_type(Type::Signal)
                .sender("org.freedesktop.DBus")
                .interface("org.freedesktop.DBus")
                .member("NameOwnerChanged")
                .arg(0, SERVICE)
                .build()?;
            let events = MessageStream::for_match_rule(events, &self.bus, None).await?;
            let owner = MessageStream::for_match_rule(owner, &self.bus, None).await?;
            Ok((events, owner))
        };
        let (events, owner) = within("subscribe to shutdowns", listen).await?;
        let events = events.map(|signal| Some(signal.ok()?.body().deserialize::<bool>().ok()));
        // Another owner of the name is another logind: the locks of this one are gone.
        let ended = owner.map(|_| None);
        let all = futures::stream::select(events, ended).take_while(|event| std::future::ready(event.is_some()));
        Ok(all.filter_map(|event| std::future::ready(event.flatten())).boxed())
    }
}

#[cfg(test)]
#[path = "logind_tests.rs"]
mod tests;
