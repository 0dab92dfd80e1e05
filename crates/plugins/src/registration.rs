//! Plugins that come and go: sockets in `ROOT/plugins_registry`.
//!
//! ```text
//!  socket appears ──▶ GetInfo ──▶ handler of its type ──▶ NotifyRegistrationStatus ──▶ registered
//!                       ▲  │ failed                                                       │
//!                       └──┘ 500 ms, doubling to 2m2s          socket goes, or is replaced ▼
//!                                                                                   handler.gone
//! ```
//!
//! Tasks: [`run`] watches the directory (inotify) and owns the table of sockets; one task for each socket talks to its plugin, so that one that
//! hangs or speaks nonsense keeps no other waiting. All end with the agent. Queue: none, a change of the directory is looked at as a whole.

use std::collections::BTreeMap;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use host::watch::DirWatch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::wire::registration_v1::registration_client::RegistrationClient;
use crate::wire::registration_v1::{InfoRequest, PluginInfo, RegistrationStatus};
use crate::wire::{RpcError, channel};

/// A plugin's answer to GetInfo and NotifyRegistrationStatus.
const ANSWER: Duration = Duration::from_secs(10);
/// First wait after a failure.
const FIRST_WAIT: Duration = Duration::from_millis(500);
/// The longest one.
const LONGEST_WAIT: Duration = Duration::from_secs(122);
/// How long to wait when the directory cannot be watched.
const WATCH_AGAIN: Duration = Duration::from_secs(10);

/// Takes plugins of one type.
#[async_trait]
pub trait Handler: Send + Sync {
    /// `type` in the plugin's answer: `CSIPlugin`, `DRAPlugin`, `DevicePlugin`.
    fn kind(&self) -> &'static str;
    /// Takes the plugin, or one of the same name anew. The error is told to the plugin, and it is tried again.
    async fn register(&self, info: &PluginInfo) -> Result<(), String>;
    /// Its socket is gone; `endpoint` as it registered with.
    fn gone(&self, name: &str, endpoint: &str);
}

/// What tells a socket from another one at the same path.
type Identity = (u64, i64, i64);

/// The sockets in the directory.
fn sockets(dir: &Path) -> BTreeMap<PathBuf, Identity> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let hidden = entry.file_name().to_string_lossy().starts_with('.');
        if let (false, Ok(meta)) = (hidden, entry.metadata())
            && meta.file_type().is_socket()
        {
            found.insert(entry.path(), (meta.ino(), meta.ctime(), meta.ctime_nsec()));
        }
    }
    found
}

/// What came of a socket: which handler took which name and endpoint.
type Taken = Arc<Mutex<Option<(usize, String, String)>>>;

struct Known {
    identity: Identity,
    stop: CancellationToken,
    taken: Taken,
}

/// Follows the directory until `stop`.
pub async fn run(dir: PathBuf, handlers: Vec<Arc<dyn Handler>>, stop: CancellationToken) {
    let handlers: Arc<[Arc<dyn Handler>]> = handlers.into();
    let mut known: BTreeMap<PathBuf, Known> = BTreeMap::new();
    loop {
        let watching = async {
            let mut watch = DirWatch::new(&dir)?;
            loop {
                watch.next().await?;
                look(&dir, &handlers, &mut known, &stop);
            }
        };
        let failed: host::Result<()> = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            failed = watching => failed,
        };
        if let Err(e) = failed {
            warn!(err = e.full(), dir = %dir.display(), "Plugins' sockets cannot be watched, it is tried again");
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(WATCH_AGAIN) => look(&dir, &handlers, &mut known, &stop),
        }
    }
}

/// Compares the directory with what is known.
fn look(
    dir: &Path,
    handlers: &Arc<[Arc<dyn Handler>]>,
    known: &mut BTreeMap<PathBuf, Known>,
    stop: &CancellationToken,
) {
    let found = sockets(dir);
    known.retain(|path, socket| {
        if found.get(path) == Some(&socket.identity) {
            return true;
        }
        socket.stop.cancel();
        // A plugin that is replaced is registered anew, under whatever name it then has.
        let taken = socket.taken.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((handler, name, endpoint)) = taken {
            info!(socket = %path.display(), plugin = name, "A plugin's socket is gone");
            handlers[handler].gone(&name, &endpoint);
        }
        false
    });
    for (path, identity) in found {
        if known.contains_key(&path) {
            continue;
        }
        let (stop, taken) = (stop.child_token(), Taken::default());
        tokio::spawn(register(path.clone(), handlers.clone(), taken.clone(), stop.clone()));
        known.insert(path, Known { identity, stop, taken });
    }
}

/// Talks to one plugin until it is registered or its socket is gone.
async fn register(path: PathBuf, handlers: Arc<[Arc<dyn Handler>]>, taken: Taken, stop: CancellationToken) {
    let mut wait = FIRST_WAIT;
    let mut told = String::new();
    loop {
        let tried = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            tried = try_register(&path, &handlers, &taken, &stop) => tried,
        };
        let Err(reason) = tried else { return };
        if reason != told {
            warn!(socket = %path.display(), err = reason, "Plugin cannot be registered, it is tried again");
            told = reason;
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(wait) => wait = (wait * 2).min(LONGEST_WAIT),
        }
    }
}

async fn try_register(
    path: &Path,
    handlers: &[Arc<dyn Handler>],
    taken: &Taken,
    stop: &CancellationToken,
) -> Result<(), String> {
    let mut client = RegistrationClient::new(channel(path.to_owned()));
    let at = path.display();
    let mut info = tokio::time::timeout(ANSWER, client.get_info(InfoRequest {}))
        .await
        .map_or_else(|_| Err(RpcError::timed_out()), |answer| answer.map_err(RpcError::from))
        .map_err(|e| {
            format!("RegisterPlugin error -- failed to get plugin info using RPC GetInfo at socket {at}, err: {e}")
        })?
        .into_inner();
    if info.endpoint.is_empty() {
        info.endpoint = path.display().to_string();
    }
    let result = match handlers.iter().position(|h| h.kind() == info.r#type) {
        None => Err(format!(
            "RegisterPlugin error -- no handler registered for plugin type: {} at socket {at}",
            info.r#type
        )),
        Some(at) => match handlers[at].register(&info).await {
            Ok(()) => {
                // The socket may have gone meanwhile: then nobody else takes the plugin back.
                let mut taken = taken.lock().unwrap_or_else(PoisonError::into_inner);
                if stop.is_cancelled() {
                    handlers[at].gone(&info.name, &info.endpoint);
                } else {
                    *taken = Some((at, info.name.clone(), info.endpoint.clone()));
                }
                Ok(())
            }
            failed => failed,
        },
    };
    let status = RegistrationStatus {
        plugin_registered: result.is_ok(),
        error: result.as_ref().err().cloned().unwrap_or_default(),
    };
    // A plugin that does not hear is registered all the same.
    match tokio::time::timeout(ANSWER, client.notify_registration_status(status)).await {
        Ok(Ok(_)) => {}
        failed => warn!(socket = %at, ?failed, "Plugin cannot be told of its registration"),
    }
    if result.is_ok() {
        info!(plugin = info.name, kind = info.r#type, endpoint = info.endpoint, "Plugin registered");
    }
    result
}
