//! What of a container's log is asked for (PodLogOptions), and of which container with that name.

use host::logs::read::{ReadOptions, Stream};
use jiff::{SignedDuration, Timestamp};
use model::api::{ContainerStatus, PodStatus};

use super::route::first;

/// What is wrong with a query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Wrong {
    /// 400: a value is not of its type.
    Undecodable,
    /// 422: a value is out of its range, or two do not go together.
    Invalid,
    /// 400: one stream is asked for, and the gate PodLogsQuerySplitStreams is off.
    SplitStreams(String),
}

/// A query for logs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LogQuery {
    pub(crate) follow: bool,
    pub(crate) previous: bool,
    pub(crate) read: ReadOptions,
    /// The one stream's name that is asked for.
    stream: Option<String>,
}

impl LogQuery {
    /// Reads and checks the query.
    pub(crate) fn parse(parameters: &[(String, String)], now: Timestamp) -> Result<Self, Wrong> {
        let flag = |key: &str| first(parameters, key).is_some_and(|v| !matches!(v, "false" | "0"));
        let number = |key: &str| match first(parameters, key) {
            Some(text) => text.parse::<i64>().map(Some).map_err(|_| Wrong::Undecodable),
            None => Ok(None),
        };
        // The name that this parameter had long ago; "all" is its default.
        let tail = match first(parameters, "tail") {
            Some("all") => None,
            Some(text) if !text.is_empty() => Some(text.parse::<i64>().map_err(|_| Wrong::Undecodable)?),
            _ => number("tailLines")?,
        };
        let limit = number("limitBytes")?;
        let seconds = number("sinceSeconds")?;
        let time = match first(parameters, "sinceTime") {
            Some("" | "null") => Some(None),
            Some(text) => Some(Some(text.parse::<Timestamp>().map_err(|_| Wrong::Undecodable)?)),
            None => None,
        };
        let stream = first(parameters, "stream");
        let one_stream = match stream {
            None | Some("All") => None,
            Some("Stdout") => Some(Stream::Stdout),
            Some("Stderr") => Some(Stream::Stderr),
            Some(_) => return Err(Wrong::Invalid),
        };
        let invalid = tail.is_some_and(|n| n < 0)
            || limit.is_some_and(|n| n < 1)
            || seconds.is_some_and(|n| n < 1)
            || (time.is_some() && seconds.is_some())
            || (one_stream.is_some() && tail.is_some());
        if invalid {
            return Err(Wrong::Invalid);
        }
        let follow = flag("follow");
        let ago = seconds.and_then(|n| now.checked_sub(SignedDuration::from_secs(n)).ok());
        Ok(Self {
            follow,
            previous: flag("previous"),
            read: ReadOptions {
                tail: tail.map(i64::unsigned_abs),
                stop_after_tail: !follow,
                limit_bytes: limit.map(i64::unsigned_abs),
                since: time.flatten().or(ago),
                timestamps: flag("timestamps"),
                stream: one_stream,
            },
            stream: stream.map(str::to_owned),
        })
    }

    /// Refuses what the gate does not allow; after it is known that the container is there.
    pub(crate) fn allow_streams(&self, split: bool) -> Result<(), Wrong> {
        match (&self.stream, self.read.stream) {
            (Some(name), Some(_)) if !split => Err(Wrong::SplitStreams(name.clone())),
            _ => Ok(()),
        }
    }
}

/// The id of the container whose log is meant, as `containerd://…`.
///
/// # Errors
/// Why there is none, in the Go kubelet's words.
pub(crate) fn container_id(pod: &str, status: &PodStatus, container: &str, previous: bool) -> Result<String, String> {
    let lists = [&status.container_statuses, &status.init_container_statuses, &status.ephemeral_container_statuses];
    let found: Option<&ContainerStatus> =
        lists.into_iter().find_map(|l| l.iter().flatten().find(|s| s.name == container));
    let the = format!("container {container:?} in pod {pod:?}");
    let Some(found) = found else { return Err(format!("{the} is not available")) };
    let id = |id: Option<&String>| id.filter(|id| !id.is_empty()).cloned();
    let last = found.last_state.as_ref().and_then(|s| s.terminated.as_ref());
    let last_id = id(last.and_then(|t| t.container_id.as_ref()));
    if previous {
        return last_id.ok_or_else(|| format!("previous terminated {the} not found"));
    }
    let state = found.state.clone().unwrap_or_default();
    if state.running.is_some() {
        return Ok(found.container_id.clone().unwrap_or_default());
    }
    if let Some(terminated) = &state.terminated {
        // Empty when the next container could not be started.
        return id(terminated.container_id.as_ref()).or(last_id).ok_or_else(|| format!("{the} is terminated"));
    }
    if last.is_some() {
        return last_id.ok_or_else(|| format!("{the} is terminated"));
    }
    Err(match &state.waiting {
        Some(waiting) => match waiting.reason.as_deref().unwrap_or_default() {
            "ErrImagePull" => format!("{the} is waiting to start: image can't be pulled"),
            "ImagePullBackOff" => format!("{the} is waiting to start: trying and failing to pull image"),
            reason => format!("{the} is waiting to start: {reason}"),
        },
        None => format!("{the} is waiting to start - no logs yet"),
    })
}
