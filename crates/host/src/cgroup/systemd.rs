//! Slices, made by systemd over D-Bus (`org.freedesktop.systemd1.Manager`), as the runtimes' own systemd drivers do.
//!
//! Each request has its own connection: it costs about a millisecond, needs no task that lives on, and survives restarts of the bus.

use std::sync::OnceLock;
use std::time::Duration;

use futures::StreamExt;
use zbus::message::Type;
use zbus::{Connection, MatchRule, Message, MessageStream, OwnedObjectPath, Variant};

use super::{CgroupError, CgroupResult, CgroupVersion};

/// How long systemd may take for one job.
const JOB_WAIT: Duration = Duration::from_secs(30);

const MANAGER: &str = "org.freedesktop.systemd1.Manager";
const SERVICE: &str = "org.freedesktop.systemd1";
const PATH: &str = "/org/freedesktop/systemd1";

/// A resource property's value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PropertyValue {
    /// D-Bus type `t`.
    Number(u64),
    /// A set of CPUs, as D-Bus type `ay`: bit n of byte m is CPU 8·m + n.
    Cpus(Vec<u8>),
}

/// Who makes slices. Every method blocks.
pub trait SliceUnits: Send + Sync {
    /// systemd's version number.
    ///
    /// # Errors
    /// systemd does not answer.
    fn version(&self) -> CgroupResult<u32>;

    /// Starts a transient slice below this parent, with all accounting on; one that is there is left as it is.
    ///
    /// # Errors
    /// systemd refuses, fails or does not answer.
    fn start_slice(&self, unit: &str, parent: &str, version: CgroupVersion) -> CgroupResult<()>;

    /// Sets resource properties until the next boot (systemd.resource-control(5)).
    ///
    /// # Errors
    /// systemd refuses or does not answer.
    fn set_properties(&self, unit: &str, properties: &[(&'static str, PropertyValue)]) -> CgroupResult<()>;

    /// Stops a slice and all in it; one that is not there counts as stopped.
    ///
    /// # Errors
    /// systemd refuses or does not answer.
    fn stop_slice(&self, unit: &str) -> CgroupResult<()>;
}

/// systemd on the system bus.
#[derive(Debug, Default)]
pub struct SystemdBus {
    address: Option<String>,
    version: OnceLock<u32>,
}

type Properties<'a> = Vec<(&'a str, Variant<'a>)>;

impl SystemdBus {
    /// systemd on the bus at this D-Bus address (`unix:path=…`); None: the standard system bus.
    pub fn new(address: Option<String>) -> Self {
        Self { address, version: OnceLock::new() }
    }

    /// Runs one request on a thread of its own, since the caller's may belong to a runtime already.
    fn run<T, F>(&self, what: String, request: F) -> CgroupResult<T>
    where
        T: Send,
        F: AsyncFnOnce(&Connection) -> zbus::Result<T> + Send,
    {
        let work = || -> Result<T, Box<dyn std::error::Error + Send + Sync>> {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                let request = async {
                    let builder = match &self.address {
                        Some(address) => zbus::connection::Builder::address(address.as_str()),
                        None => zbus::connection::Builder::system(),
                    };
                    request(&builder.build().await?).await
                };
                match tokio::time::timeout(JOB_WAIT, request).await {
                    Ok(answer) => Ok(answer?),
                    Err(_) => Err(format!("no answer within {} s", JOB_WAIT.as_secs()).into()),
                }
            })
        };
        let answer = std::thread::scope(|scope| scope.spawn(work).join());
        answer
            .unwrap_or_else(|_| Err("the request's thread panicked".into()))
            .map_err(|source| CgroupError::Systemd { what, source })
    }
}

async fn call<B>(bus: &Connection, method: &str, body: &B) -> zbus::Result<Message>
where
    B: serde::Serialize + zbus::DynamicType,
{
    bus.call_method(Some(SERVICE), PATH, Some(MANAGER), method, body).await
}

/// Queues a job and waits for its end: `done`, `failed`, `dependency`, …
async fn job<B>(bus: &Connection, method: &str, body: &B) -> zbus::Result<String>
where
    B: serde::Serialize + zbus::DynamicType,
{
    let ended =
        MatchRule::builder().msg_type(Type::Signal).sender(SERVICE).interface(MANAGER).member("JobRemoved").build()?;
    // Listened to before the job exists, so that its end cannot be missed.
    let mut ended = MessageStream::for_match_rule(ended, bus, None).await?;
    call(bus, "Subscribe", &()).await?;
    let job: OwnedObjectPath = call(bus, method, body).await?.body().deserialize()?;
    while let Some(signal) = ended.next().await {
        let signal = signal?;
        let body = signal.body();
        let (_, path, _, result): (u32, OwnedObjectPath, String, String) = body.deserialize()?;
        if path == job {
            return Ok(result);
        }
    }
    Err(zbus::Error::Failure("the bus closed the connection".into()))
}

fn is_error(error: &zbus::Error, name: &str) -> bool {
    matches!(error, zbus::Error::MethodError(n, _, _) if n.as_str().ends_with(name))
}

/// The leading number of `252.39-1~deb12u1`, `v245`, `(255)`.
fn version_number(text: &str) -> Option<u32> {
    let digits: String = text.chars().skip_while(|c| !c.is_ascii_digit()).take_while(char::is_ascii_digit).collect();
    digits.parse().ok()
}

impl SliceUnits for SystemdBus {
    fn version(&self) -> CgroupResult<u32> {
        if let Some(version) = self.version.get() {
            return Ok(*version);
        }
        let text = self.run("ask systemd for its version".into(), async |bus: &Connection| {
            let body = (MANAGER, "Version");
            let properties = Some("org.freedesktop.DBus.Properties");
            let answer = bus.call_method(Some(SERVICE), PATH, properties, "Get", &body).await?;
            let body = answer.body();
            let value: Variant<'_> = body.deserialize()?;
            value.downcast::<String>()
        })?;
        let version = version_number(&text).ok_or_else(|| CgroupError::Systemd {
            what: "ask systemd for its version".into(),
            source: format!("{text:?} has no number").into(),
        })?;
        Ok(*self.version.get_or_init(|| version))
    }

    fn start_slice(&self, unit: &str, parent: &str, version: CgroupVersion) -> CgroupResult<()> {
        let io = if version == CgroupVersion::V2 { "IOAccounting" } else { "BlockIOAccounting" };
        let what = format!("start slice {unit}");
        let result = self.run(what.clone(), async |bus: &Connection| {
            let description = format!("rubelet cgroup {unit}");
            let properties: Properties<'_> = vec![
                ("Description", Variant::new(description.as_str())),
                // A slice's parent is in its name; wanting it only brings it up.
                ("Wants", Variant::new(vec![parent])),
                ("MemoryAccounting", Variant::new(true)),
                ("CPUAccounting", Variant::new(true)),
                (io, Variant::new(true)),
                ("TasksAccounting", Variant::new(true)),
                // Else it would be stopped at shutdown before the agent is.
                ("DefaultDependencies", Variant::new(false)),
            ];
            let auxiliary: Vec<(&str, Properties<'_>)> = Vec::new();
            match job(bus, "StartTransientUnit", &(unit, "replace", properties, auxiliary)).await {
                Err(e) if is_error(&e, ".UnitExists") => Ok("done".into()),
                other => other,
            }
        })?;
        match result.as_str() {
            "done" => Ok(()),
            other => {
                let _ = self.run(what.clone(), async |bus: &Connection| call(bus, "ResetFailedUnit", &unit).await);
                Err(CgroupError::Systemd { what, source: format!("the job ended as {other:?}").into() })
            }
        }
    }

    fn set_properties(&self, unit: &str, properties: &[(&'static str, PropertyValue)]) -> CgroupResult<()> {
        self.run(format!("set properties of slice {unit}"), async |bus: &Connection| {
            let variant = |value: &PropertyValue| match value {
                PropertyValue::Number(n) => Variant::new(*n),
                PropertyValue::Cpus(mask) => Variant::new(mask.clone()),
            };
            let properties: Properties<'_> = properties.iter().map(|(n, v)| (*n, variant(v))).collect();
            call(bus, "SetUnitProperties", &(unit, true, properties)).await.map(drop)
        })
    }

    fn stop_slice(&self, unit: &str) -> CgroupResult<()> {
        self.run(format!("stop slice {unit}"), async |bus: &Connection| {
            match job(bus, "StopUnit", &(unit, "replace")).await {
                Err(e) if is_error(&e, ".NoSuchUnit") => return Ok(()),
                Err(e) => return Err(e),
                Ok(result) if result != "done" => {
                    tracing::warn!(unit, result, "systemd did not stop the slice cleanly")
                }
                Ok(_) => {}
            }
            // A failed unit stays loaded until it is reset.
            let _ = call(bus, "ResetFailedUnit", &unit).await;
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions() {
        for (text, number) in [("252.39-1~deb12u1", 252), ("v245.4-1.fc32", 245), ("\"239\"", 239)] {
            assert_eq!(version_number(text), Some(number), "{text}");
        }
        assert_eq!(version_number("unknown"), None);
    }

    #[test]
    fn no_bus_is_an_error_that_says_what_was_asked() {
        let bus = SystemdBus::new(Some("unix:path=/nonexistent/bus".into()));
        let error = bus.stop_slice("kubepods.slice").unwrap_err();
        assert_eq!(error.to_string(), "stop slice kubepods.slice");
        assert!(std::error::Error::source(&error).is_some());
    }
}
