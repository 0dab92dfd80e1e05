//! The way of an event from the room that saw something to the API server: never blocking, bounded, counted when dropped.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Event, ObjectReference};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::correlate::{Correlator, Outcome, make};
use crate::calls::EventApi;
use crate::error::{ClusterError, ErrorKind};
use crate::{Unit, Wall};

/// Events that may wait (as client-go's broadcaster).
const QUEUE: usize = 1000;
/// Tries for one event (as client-go).
const TRIES: u32 = 12;
/// Between tries; the first wait is a random part of it, so that nodes do not come back all at once.
const WAIT: Duration = Duration::from_secs(10);

/// Takes events. Clones share one queue.
#[derive(Clone)]
pub struct Recorder {
    component: Arc<str>,
    host: Arc<str>,
    queue: mpsc::Sender<Event>,
    dropped: Arc<AtomicU64>,
    wall: Wall,
}

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recorder").field("host", &self.host).field("dropped", &self.dropped()).finish_non_exhaustive()
    }
}

impl Recorder {
    /// A recorder of `component` on node `host`, and the task that writes what it takes.
    pub fn new(component: &str, host: &str, api: Arc<dyn EventApi>, wall: Wall, unit: Unit) -> (Self, EventWriter) {
        let (queue, events) = mpsc::channel(QUEUE);
        let recorder =
            Self { component: component.into(), host: host.into(), queue, dropped: Arc::default(), wall: wall.clone() };
        (recorder, EventWriter { api, events, correlator: Correlator::default(), wall, unit, refused: None })
    }

    /// Records an event of type `Normal` or `Warning`. Never waits; a full queue drops it.
    pub fn event(&self, about: &ObjectReference, kind: &str, reason: &str, message: &str) {
        self.send(reason, make(about, &self.component, &self.host, kind, reason, message, (self.wall)()));
    }

    /// As [`Recorder::event`], with annotations.
    pub fn annotated(
        &self,
        about: &ObjectReference,
        annotations: &BTreeMap<String, String>,
        kind: &str,
        reason: &str,
        message: &str,
    ) {
        let mut event = make(about, &self.component, &self.host, kind, reason, message, (self.wall)());
        event.metadata.annotations = Some(annotations.clone()).filter(|a| !a.is_empty());
        self.send(reason, event);
    }

    fn send(&self, reason: &str, event: Event) {
        if self.queue.try_send(event).is_err() {
            let before = self.dropped.fetch_add(1, Ordering::Relaxed);
            if before.is_multiple_of(100) {
                tracing::error!(reason, "Unable to record event: too many queued events, dropped event");
            }
        }
    }

    /// How many were dropped.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}

/// Writes events one after the other.
pub struct EventWriter {
    api: Arc<dyn EventApi>,
    events: mpsc::Receiver<Event>,
    correlator: Correlator,
    wall: Wall,
    unit: Unit,
    /// Why the server refused the last event, until it takes one.
    refused: Option<String>,
}

impl EventWriter {
    /// Runs until it is stopped or every recorder is gone.
    pub async fn run(mut self, stop: CancellationToken) {
        loop {
            let event = tokio::select! {
                biased;
                () = stop.cancelled() => return,
                event = self.events.recv() => event,
            };
            let Some(event) = event else { return };
            let outcome = self.correlator.correlate(event, (self.wall)());
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = self.write(outcome) => {}
            }
        }
    }

    /// The same refusal of event after event is worth one line.
    fn is_news(&mut self, error: &ClusterError) -> bool {
        let known = self.refused.as_ref() == Some(&error.message);
        self.refused = Some(error.message.clone());
        !known
    }

    async fn write(&mut self, outcome: Outcome) {
        let (mut event, mut patch) = match outcome {
            Outcome::Skip => return,
            Outcome::Create(event) => (event, None),
            Outcome::Patch { event, patch } => (event, Some(patch)),
        };
        for tried in 1..=TRIES {
            let result = match &patch {
                Some(change) => {
                    let namespace = event.metadata.namespace.as_deref().unwrap_or_default();
                    let name = event.metadata.name.as_deref().unwrap_or_default();
                    self.api.patch_event(namespace, name, change).await
                }
                None => {
                    event.metadata.resource_version = None;
                    self.api.create_event(&event).await
                }
            };
            let error = match result {
                Ok(stored) => {
                    self.refused = None;
                    return self.correlator.written(&event, stored);
                }
                // The event has expired on the server (an hour, by default): it is made anew, at once.
                Err(error) if error.is_not_found() && patch.take().is_some() => continue,
                Err(error) => error,
            };
            // An answer is final, as in client-go: nothing here is worth a second try but the want of an answer.
            if !matches!(
                error.kind,
                ErrorKind::Unreachable | ErrorKind::Timeout | ErrorKind::Tls | ErrorKind::Throttled { .. }
            ) {
                if error.is_already_exists() || error.kind.concerns_every_call() || !self.is_news(&error) {
                    tracing::debug!(%error, "Server rejected event (will not retry!)");
                } else {
                    tracing::error!(%error, "Server rejected event (will not retry!)");
                }
                return;
            }
            if tried == TRIES {
                tracing::error!(%error, "Unable to write event (retry limit exceeded!)");
                return;
            }
            if tried == 1 && !error.kind.concerns_every_call() {
                tracing::warn!(%error, "Unable to write event (may retry after sleeping)");
            }
            let wait = if tried == 1 { WAIT.mul_f64((self.unit)()) } else { WAIT };
            tokio::time::sleep(wait.max(error.retry_after().unwrap_or_default())).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use async_trait::async_trait;
    use serde_json::Value;
    use tokio::time::Instant;

    use super::*;
    use crate::error::ClusterResult;
    use crate::events::StoredEvent;

    #[derive(Default)]
    struct Api {
        script: Mutex<Vec<ErrorKind>>,
        calls: Mutex<Vec<String>>,
    }

    impl Api {
        fn answer(&self, call: String, event: StoredEvent) -> ClusterResult<StoredEvent> {
            self.calls.lock().unwrap().push(call);
            match self.script.lock().unwrap().pop() {
                Some(kind) => Err(ClusterError::new("event", kind, "no")),
                None => Ok(event),
            }
        }

        fn calls(&self) -> Vec<String> {
            self.calls.lock().unwrap().clone()
        }
    }

    #[async_trait]
    impl EventApi for Api {
        async fn create_event(&self, event: &Event) -> ClusterResult<StoredEvent> {
            assert!(event.metadata.resource_version.is_none());
            let mut stored = StoredEvent { count: event.count, ..StoredEvent::default() };
            stored.metadata.name.clone_from(&event.metadata.name);
            stored.metadata.resource_version = Some("1".into());
            self.answer(format!("create {}", event.message.as_deref().unwrap()), stored)
        }

        async fn patch_event(&self, _: &str, name: &str, patch: &Value) -> ClusterResult<StoredEvent> {
            let mut stored = StoredEvent { count: patch["count"].as_i64().map(|c| c as i32), ..StoredEvent::default() };
            stored.metadata.name = Some(name.to_owned());
            self.answer(format!("patch {} {}", name.split('.').next().unwrap(), patch["count"]), stored)
        }
    }

    fn start(script: &[ErrorKind]) -> (Recorder, Arc<Api>) {
        let api = Arc::new(Api { script: Mutex::new(script.iter().rev().copied().collect()), ..Api::default() });
        let wall: Wall = Arc::new(|| Timestamp::from_second(1_700_000_000).unwrap());
        let (recorder, writer) = Recorder::new("kubelet", "n", api.clone(), wall, Arc::new(|| 0.5));
        tokio::spawn(writer.run(CancellationToken::new()));
        (recorder, api)
    }
    use jiff::Timestamp;

    fn about() -> ObjectReference {
        ObjectReference { name: Some("p".into()), namespace: Some("ns".into()), ..ObjectReference::default() }
    }

    async fn settle() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn created_once_then_counted_and_made_anew_when_the_server_forgot() {
        let (recorder, api) = start(&[]);
        recorder.event(&about(), "Normal", "Pulled", "m");
        recorder.event(&about(), "Normal", "Pulled", "m");
        settle().await;
        assert_eq!(api.calls(), ["create m", "patch p 2"]);
        api.script.lock().unwrap().push(ErrorKind::NotFound);
        recorder.event(&about(), "Normal", "Pulled", "m");
        settle().await;
        assert_eq!(api.calls()[2..], ["patch p 3", "create m"]);
    }

    #[tokio::test(start_paused = true)]
    async fn an_absent_server_is_tried_again_and_the_rest_waits_in_line() {
        let (recorder, api) = start(&[ErrorKind::Unreachable, ErrorKind::Timeout]);
        let start = Instant::now();
        recorder.event(&about(), "Normal", "A", "a");
        recorder.event(&about(), "Normal", "B", "b");
        while api.calls().len() < 4 {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert_eq!(api.calls(), ["create a", "create a", "create a", "create b"]);
        assert!(start.elapsed() >= Duration::from_secs(15), "{:?}", start.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_refusal_is_final() {
        let (recorder, api) = start(&[ErrorKind::Forbidden]);
        recorder.event(&about(), "Normal", "A", "a");
        recorder.event(&about(), "Normal", "B", "b");
        settle().await;
        assert_eq!(api.calls(), ["create a", "create b"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_queue_drops_and_counts() {
        let api = Arc::new(Api::default());
        let (recorder, _writer) = Recorder::new("kubelet", "n", api, crate::system_wall(), Arc::new(|| 0.5));
        for _ in 0..QUEUE + 7 {
            recorder.event(&about(), "Normal", "A", "a");
        }
        assert_eq!(recorder.dropped(), 7);
    }
}
