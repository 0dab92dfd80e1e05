//! Log lines as klog and the Kubernetes JSON format write them, to stderr, with `-v` and `--vmodule`.
//!
//! ```text
//! I1129 19:16:53.123456   12345 worker.rs:88] "SyncLoop ADD" source="file" pods=["kube-system/etcd-node-a"]
//! E1129 19:16:54.000001   12345 worker.rs:91] "Error syncing pod, skipping" err="failed to …" pod="default/web-node-a"
//! ```
//!
//! Severity letter, MMDD and local time, process id, file and line, the quoted message, then the fields: strings quoted,
//! numbers, booleans, lists and maps plain, text of several lines between `<` and ` >`. A field named `err` comes first on
//! an error, as klog prints it. Fields of the enclosing spans come before the event's own; of two with one name the inner counts.
//!
//! # Which line is shown
//!
//! | event | severity | shown when |
//! |---|---|---|
//! | `error!` | E | always |
//! | `warn!` | W | always |
//! | `info!` | I | always: notable facts, such as a pod added or a container restarted |
//! | `info!(v = N, …)` | I | verbosity ≥ N; `v` is not printed in text |
//! | `debug!` | I | verbosity ≥ 4, or `v` if that is larger |
//! | `trace!` | I | verbosity ≥ 6, or `v` if that is larger |
//!
//! Verbosity is `-v`, or the level of the first `--vmodule` pattern that matches the file if that is higher. Debug and trace
//! events of the HTTP and gRPC libraries need 10, so that `-v=6` stays readable. Go's logs at `-v=2`, the common setting of
//! installers, correspond to `info!(v = 2, …)`.
//!
//! JSON: `{"ts":MILLISECONDS,"caller":"pod/worker.rs:88","msg":"…","v":0,…}`; errors have `err` last and no `v`.

mod fields;
mod vmodule;

use std::cell::RefCell;
use std::fmt::Write as _;
use std::io::Write;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use jiff::tz::TimeZone;
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;

use fields::{Fields, write_json_pair, write_json_string, write_quoted, write_text_pair};
pub use vmodule::{VModule, VModuleError};

/// Verbosity of `debug!` and `trace!`.
const DEBUG_V: i32 = 4;
const TRACE_V: i32 = 6;
/// Verbosity of debug and trace events from libraries below [`LIBRARIES`].
const LIBRARY_V: i32 = 10;
const LIBRARIES: [&str; 8] = ["h2", "hyper", "hyper_util", "mio", "tokio", "tokio_util", "tonic", "tower"];

/// `--logging-format`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// klog's lines.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// How to log.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// `--logging-format`.
    pub format: Format,
    /// `-v`; 0 is quiet.
    pub verbosity: i32,
    /// `--vmodule`.
    pub vmodule: Vec<VModule>,
}

/// Logging was set up a second time.
#[derive(Debug, thiserror::Error)]
#[error("setting up logging")]
pub struct InitError(#[from] tracing::subscriber::SetGlobalDefaultError);

/// Sets up logging to stderr for the whole process. To be called once.
///
/// # Errors
/// When the process already has a log subscriber.
pub fn init(options: Options) -> Result<Handle, InitError> {
    let (layer, handle) = layer(options, Box::new(std::io::stderr()), Clock::system());
    tracing::subscriber::set_global_default(tracing_subscriber::registry().with(layer))?;
    Ok(handle)
}

/// The layer and its handle, writing to any place under any clock.
pub fn layer(options: Options, writer: Box<dyn Write + Send>, clock: Clock) -> (KlogLayer, Handle) {
    let shared = Arc::new(Shared {
        format: options.format,
        verbosity: AtomicI32::new(options.verbosity),
        vmodule: RwLock::new(options.vmodule),
        writer: Mutex::new(writer),
        write_began: AtomicU64::new(0),
        epoch: Instant::now(),
        clock,
        pid: std::process::id(),
    });
    (KlogLayer(shared.clone()), Handle(shared))
}

/// Where lines take their time from.
#[derive(Clone)]
pub struct Clock {
    now: Arc<dyn Fn() -> Timestamp + Send + Sync>,
    zone: TimeZone,
}

impl Clock {
    /// The host's clock and time zone.
    pub fn system() -> Self {
        Self { now: Arc::new(Timestamp::now), zone: TimeZone::system() }
    }

    /// Another clock and zone, for tests and simulation.
    pub fn new(now: impl Fn() -> Timestamp + Send + Sync + 'static, zone: TimeZone) -> Self {
        Self { now: Arc::new(now), zone }
    }
}

struct Shared {
    format: Format,
    verbosity: AtomicI32,
    vmodule: RwLock<Vec<VModule>>,
    writer: Mutex<Box<dyn Write + Send>>,
    /// Milliseconds after `epoch`, plus one, at which the write in progress began; 0 when none is.
    write_began: AtomicU64,
    epoch: Instant,
    clock: Clock,
    pid: u32,
}

/// Changes how the running process logs.
#[derive(Clone)]
pub struct Handle(Arc<Shared>);

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handle").field("verbosity", &self.verbosity()).finish_non_exhaustive()
    }
}

impl Handle {
    /// The verbosity now.
    pub fn verbosity(&self) -> i32 {
        self.0.verbosity.load(Ordering::Relaxed)
    }

    /// Another verbosity from now on (`PUT /debug/flags/v`).
    pub fn set_verbosity(&self, verbosity: i32) {
        self.0.verbosity.store(verbosity, Ordering::Relaxed);
        tracing::callsite::rebuild_interest_cache();
    }

    /// Other `--vmodule` patterns from now on.
    pub fn set_vmodule(&self, vmodule: Vec<VModule>) {
        *self.0.vmodule.write().unwrap_or_else(PoisonError::into_inner) = vmodule;
        tracing::callsite::rebuild_interest_cache();
    }

    /// For how long the line now being written has been stuck, as when nobody reads stderr any more; zero when none is.
    pub fn blocked_for(&self) -> Duration {
        match self.0.write_began.load(Ordering::Relaxed) {
            0 => Duration::ZERO,
            began => self.0.epoch.elapsed().saturating_sub(Duration::from_millis(began - 1)),
        }
    }
}

impl Shared {
    /// The verbosity in force for a callsite.
    fn threshold(&self, metadata: &Metadata<'_>) -> i32 {
        let verbosity = self.verbosity.load(Ordering::Relaxed);
        let vmodule = self.vmodule.read().unwrap_or_else(PoisonError::into_inner);
        if vmodule.is_empty() {
            return verbosity;
        }
        let file = metadata.file().unwrap_or_default();
        vmodule.iter().find_map(|pattern| pattern.level_for(file)).map_or(verbosity, |level| verbosity.max(level))
    }

    fn write(&self, line: &str) {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let began = u64::try_from(self.epoch.elapsed().as_millis()).unwrap_or(u64::MAX - 1) + 1;
        self.write_began.store(began, Ordering::Relaxed);
        // There is nowhere to report a failed log write to.
        let _ = writer.write_all(line.as_bytes());
        self.write_began.store(0, Ordering::Relaxed);
    }
}

/// The verbosity that an event of this callsite needs, apart from its `v` field.
fn needed(metadata: &Metadata<'_>) -> i32 {
    let own = match *metadata.level() {
        Level::ERROR | Level::WARN | Level::INFO => return i32::MIN,
        Level::DEBUG => DEBUG_V,
        Level::TRACE => TRACE_V,
    };
    let library = metadata.target().split("::").next().unwrap_or_default();
    if LIBRARIES.contains(&library) { LIBRARY_V } else { own }
}

/// Formats events and writes them. Made by [`layer`].
pub struct KlogLayer(Arc<Shared>);

/// A span's fields.
struct SpanFields(Fields);

impl<S> tracing_subscriber::Layer<S> for KlogLayer
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    fn enabled(&self, metadata: &Metadata<'_>, _: Context<'_, S>) -> bool {
        metadata.is_span() || needed(metadata) <= self.0.threshold(metadata)
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        let vmodule = !self.0.vmodule.read().unwrap_or_else(PoisonError::into_inner).is_empty();
        Some(match self.0.verbosity.load(Ordering::Relaxed) {
            _ if vmodule => LevelFilter::TRACE,
            TRACE_V.. => LevelFilter::TRACE,
            DEBUG_V.. => LevelFilter::DEBUG,
            _ => LevelFilter::INFO,
        })
    }

    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        if let Some(span) = context.span(id) {
            let mut fields = Fields::default();
            attributes.record(&mut fields);
            span.extensions_mut().insert(SpanFields(fields));
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        if let Some(span) = context.span(id)
            && let Some(SpanFields(fields)) = span.extensions_mut().get_mut::<SpanFields>()
        {
            values.record(fields);
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let metadata = event.metadata();
        let mut fields = Fields::default();
        for span in context.event_scope(event).into_iter().flat_map(|scope| scope.from_root()) {
            if let Some(SpanFields(held)) = span.extensions().get::<SpanFields>() {
                for (name, value) in &held.pairs {
                    fields.add(name, value.clone());
                }
            }
        }
        event.record(&mut fields);

        let severe = matches!(*metadata.level(), Level::ERROR | Level::WARN);
        let v = match (severe, fields.v) {
            (true, _) => 0,
            (false, v) => i64::from(needed(metadata).max(0)).max(v.unwrap_or(0)),
        };
        if v > 0 && v > i64::from(self.0.threshold(metadata)) {
            return;
        }

        thread_local! {
            static LINE: RefCell<String> = const { RefCell::new(String::new()) };
        }
        LINE.with(|line| match line.try_borrow_mut() {
            Ok(mut line) => {
                line.clear();
                self.format(&mut line, metadata, v, fields);
                self.0.write(&line);
            }
            // An event from within the formatting of a field: rare, so a line of its own.
            Err(_) => {
                let mut line = String::new();
                self.format(&mut line, metadata, v, fields);
                self.0.write(&line);
            }
        });
    }
}

impl KlogLayer {
    fn format(&self, line: &mut String, metadata: &Metadata<'_>, v: i64, fields: Fields) {
        match self.0.format {
            Format::Text => self.format_text(line, metadata, fields),
            Format::Json => self.format_json(line, metadata, v, fields),
        }
        line.push('\n');
    }

    fn format_text(&self, line: &mut String, metadata: &Metadata<'_>, mut fields: Fields) {
        let letter = match *metadata.level() {
            Level::ERROR => 'E',
            Level::WARN => 'W',
            _ => 'I',
        };
        let now = (self.0.clock.now)().to_zoned(self.0.clock.zone.clone());
        let path = metadata.file().unwrap_or("???");
        let file = path.rsplit('/').next().unwrap_or(path);
        // Writing to a String cannot fail.
        let _ = write!(
            line,
            "{letter}{:02}{:02} {:02}:{:02}:{:02}.{:06} {:>7} {file}:{}] ",
            now.month(),
            now.day(),
            now.hour(),
            now.minute(),
            now.second(),
            now.subsec_nanosecond() / 1000,
            self.0.pid,
            metadata.line().unwrap_or(0),
        );
        write_quoted(line, &fields.message);
        if *metadata.level() == Level::ERROR
            && let Some(err) = fields.take_err()
        {
            write_text_pair(line, "err", &err);
        }
        for (name, value) in &fields.pairs {
            write_text_pair(line, name, value);
        }
    }

    fn format_json(&self, line: &mut String, metadata: &Metadata<'_>, v: i64, mut fields: Fields) {
        let millis = (self.0.clock.now)().as_nanosecond() as f64 / 1e6;
        let _ = write!(
            line,
            "{{\"ts\":{millis},\"caller\":\"{}:{}\",\"msg\":",
            short_path(metadata.file().unwrap_or("???")),
            metadata.line().unwrap_or(0),
        );
        write_json_string(line, &fields.message);
        let error = *metadata.level() == Level::ERROR;
        if !error {
            let _ = write!(line, ",\"v\":{v}");
        }
        let err = if error { fields.take_err() } else { None };
        for (name, value) in &fields.pairs {
            write_json_pair(line, name, value);
        }
        if let Some(err) = err {
            write_json_pair(line, "err", &err);
        }
        line.push('}');
    }
}

/// `DIRECTORY/FILE`; the crate's directory stands for its `src`.
fn short_path(path: &str) -> String {
    let mut parts = path.rsplit('/');
    let file = parts.next().unwrap_or(path);
    match parts.find(|part| *part != "src") {
        Some(directory) if !directory.is_empty() => format!("{directory}/{file}"),
        _ => file.to_owned(),
    }
}

#[cfg(test)]
mod tests;
