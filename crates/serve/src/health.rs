//! Health checks and the text that `/healthz` gives, as Kubernetes components write it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use http::{StatusCode, Uri};
use telemetry::metrics::Metrics;
use telemetry::{LogLimiter, klog};

use crate::NodeView;
use crate::reply::{Reply, error, nosniff, text};

/// A log write that takes longer than this counts as blocked.
const LOG_BLOCKED: Duration = Duration::from_secs(120);
/// A failing check is logged once in this time, however often it is asked for.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Which checks `/healthz` runs; each can always be asked for by its own path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checks {
    /// `ping` alone: the process answers. The Go kubelet's healthz port does this, so that a hung runtime does not make a
    /// supervisor restart the agent.
    Ping,
    /// `ping`, `log`, `syncloop` and `device-plugin`, as on the read-only port.
    All,
}

impl Checks {
    fn names(self) -> &'static [&'static str] {
        const ALL: [&str; 4] = ["ping", "log", "syncloop", "device-plugin"];
        match self {
            Self::Ping => &ALL[..1],
            Self::All => &ALL,
        }
    }
}

/// Runs the health checks; shared by the servers.
#[derive(Clone)]
pub struct Health(Arc<Inner>);

struct Inner {
    view: Arc<dyn NodeView>,
    metrics: Arc<Metrics>,
    log: Option<klog::Handle>,
    limiter: LogLimiter,
}

impl Health {
    /// The checks on this node; `log` is what [`klog::init`] gave, `None` passes that check.
    pub fn new(view: Arc<dyn NodeView>, metrics: Arc<Metrics>, log: Option<klog::Handle>) -> Self {
        Self(Arc::new(Inner { view, metrics, log, limiter: LogLimiter::new(LOG_INTERVAL) }))
    }

    /// The process's log, if it was given.
    pub(crate) fn log(&self) -> Option<&klog::Handle> {
        self.0.log.as_ref()
    }

    /// All checks at once, as the service manager's watchdog wants them.
    ///
    /// # Errors
    /// The name of the first check that fails, and why.
    pub fn all(&self) -> Result<(), String> {
        Checks::All.names().iter().try_for_each(|name| self.check(name).map_err(|why| format!("{name}: {why}")))
    }

    fn check(&self, name: &str) -> Result<(), String> {
        match name {
            "log" => match &self.0.log {
                Some(log) if log.blocked_for() > LOG_BLOCKED => Err("logging blocked".to_owned()),
                _ => Ok(()),
            },
            "syncloop" => self.0.view.sync_loop_healthy(),
            "device-plugin" => self.0.view.device_plugins_healthy(),
            _ => Ok(()),
        }
    }

    /// Answers `/healthz` and `/healthz/NAME`, whatever the method, as Go does; `None` for any other path.
    pub(crate) fn answer(&self, uri: &Uri, checks: Checks) -> Option<Reply> {
        let name = match uri.path().strip_prefix("/healthz")? {
            "" => return Some(self.answer_all(uri.query().unwrap_or_default(), checks)),
            name => name.strip_prefix('/')?,
        };
        if !Checks::All.names().contains(&name) {
            return None;
        }
        Some(match self.check(name) {
            Ok(()) => text("ok"),
            Err(reason) => error(StatusCode::INTERNAL_SERVER_ERROR, &format!("internal server error: {reason}")),
        })
    }

    fn answer_all(&self, query: &str, checks: Checks) -> Reply {
        let parameters = || query.split('&').map(|item| item.split_once('=').unwrap_or((item, "")));
        let mut excluded: Vec<&str> =
            parameters().filter(|(key, _)| *key == "exclude").map(|(_, value)| value).collect();
        excluded.sort_unstable();
        excluded.dedup();

        let mut lines = String::new();
        let mut failed = Vec::new();
        for name in checks.names() {
            if excluded.contains(name) {
                excluded.retain(|unknown| unknown != name);
                lines += &format!("[+]{name} excluded: ok\n");
                continue;
            }
            let result = self.check(name);
            self.0.metrics.health_check(name, result.is_ok());
            match result {
                Ok(()) => lines += &format!("[+]{name} ok\n"),
                Err(reason) => {
                    // This page is open to all, so the reason goes to the log only.
                    lines += &format!("[-]{name} failed: reason withheld\n");
                    failed.push((*name, reason));
                }
            }
        }
        if !excluded.is_empty() {
            let unknown: Vec<String> = excluded.iter().map(|name| format!("{name:?}")).collect();
            lines += &format!("warn: some health checks cannot be excluded: no matches for {}\n", unknown.join(","));
        }
        if !failed.is_empty() {
            for (check, reason) in &failed {
                if let Some(suppressed) = self.0.limiter.allow(check, Instant::now()) {
                    tracing::warn!(check, reason, suppressed, "Health check failed");
                }
            }
            return error(StatusCode::INTERNAL_SERVER_ERROR, &format!("{lines}healthz check failed"));
        }
        nosniff(match parameters().any(|(key, _)| key == "verbose") {
            true => text(format!("{lines}healthz check passed\n")),
            false => text("ok"),
        })
    }
}
