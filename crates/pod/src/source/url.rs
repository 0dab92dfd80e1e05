//! Static pods from a URL (`staticPodURL`): asked every `httpCheckFrequency`.
//!
//! A Pod or a PodList, YAML or JSON. A failed or bad answer changes nothing: the pods of the last good one stay. The first answers may fail for
//! long; until one was good, this source has not spoken, and nothing that it might want is removed.
//!
//! Task: owned by wire.rs, ends with [`crate::ports::Tasks::stop`]. Deadline: 10 s for each request.

use std::time::Duration;

use model::pod::{DesiredPod, PodSource};
use tokio::sync::mpsc;
use tracing::warn;

use super::{FirstSeen, SourceSet, SourceUpdate, StaticContext, same_set};
use crate::http::{Get, Tls};
use crate::ports::{Clock, error_chain};

/// Deadline of one request.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Largest answer, bytes.
const BODY_MAX: usize = 10 * 1024 * 1024;

/// Where the URL points to.
#[derive(Clone, Debug)]
pub struct ManifestUrl {
    url: String,
    host: String,
    port: u16,
    tls: bool,
    path: String,
    headers: Vec<(String, String)>,
}

impl ManifestUrl {
    /// Takes a URL apart.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(url: &str, headers: Vec<(String, String)>) -> Result<Self, String> {
        let uri: http::Uri = url.parse().map_err(|e| format!("staticPodURL {url:?} is not a URL: {e}"))?;
        let tls = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => {
                return Err(format!("staticPodURL {url:?} must begin with http:// or https://"));
            }
        };
        let host = uri.host().ok_or_else(|| format!("staticPodURL {url:?} names no host"))?;
        Ok(Self {
            host: host.trim_matches(['[', ']']).to_owned(),
            port: uri.port_u16().unwrap_or(if tls { 443 } else { 80 }),
            path: uri.path_and_query().map_or_else(|| "/".to_owned(), ToString::to_string),
            url: url.to_owned(),
            tls,
            headers,
        })
    }

    async fn fetch(&self) -> Result<Vec<u8>, String> {
        let request = Get {
            host: &self.host,
            port: self.port,
            tls: if self.tls { Tls::Verified } else { Tls::Off },
            path: &self.path,
            agent: "kubelet/v1.36.1",
            headers: self.headers.iter().map(|(n, v)| (n.as_str(), v.as_str())).collect(),
            body_max: BODY_MAX,
        };
        let answer = tokio::time::timeout(TIMEOUT, request.send())
            .await
            .map_err(|_| format!("no answer within {} s", TIMEOUT.as_secs()))?
            .map_err(|e| e.to_string())?;
        if answer.status != 200 {
            return Err(format!("{}: {}", self.url, answer.status));
        }
        if answer.cut {
            return Err(format!("answer is longer than {BODY_MAX} bytes"));
        }
        if answer.body.is_empty() {
            return Err(format!("zero-length data received from {}", self.url));
        }
        Ok(answer.body.to_vec())
    }
}

/// Runs the source until its receiver is gone.
pub async fn run(
    url: ManifestUrl,
    period: Duration,
    context: StaticContext,
    clock: Clock,
    out: mpsc::Sender<SourceUpdate>,
) {
    let origin = manifest::Origin::Url(url.url.clone());
    let mut seen = FirstSeen::default();
    let mut sent: Option<Vec<DesiredPod>> = None;
    let mut last: Option<Result<Vec<u8>, String>> = None;
    let mut tick = tokio::time::interval(period);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        let fetched = url.fetch().await;
        if last.as_ref() == Some(&fetched) {
            continue;
        }
        let parsed = match &fetched {
            Ok(bytes) => context.load(bytes, &origin, clock.now()).map_err(|e| error_chain(&e)),
            Err(reason) => Err(reason.clone()),
        };
        last = Some(fetched);
        let items = match parsed {
            Ok(items) => items,
            Err(reason) => {
                warn!(url = url.url, err = reason, "Failed to read pods from URL");
                continue;
            }
        };
        let mut pods = Vec::with_capacity(items.len());
        for item in items {
            match item {
                Ok(pod) => pods.push(pod),
                Err(e) => warn!(url = url.url, err = error_chain(&e), "Pod from URL was refused, the others go on"),
            }
        }
        let pods = seen.settle(pods);
        if sent.as_ref().is_none_or(|s| !same_set(s, &pods)) {
            if out.send(SourceSet::new(PodSource::Http, pods.clone()).into()).await.is_err() {
                return;
            }
            sent = Some(pods);
        }
    }
}
