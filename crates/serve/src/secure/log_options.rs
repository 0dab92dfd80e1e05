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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::secure::route::parameters;

    fn now() -> Timestamp {
        "2026-11-29T12:00:00Z".parse().unwrap()
    }

    fn parse(query: &str) -> Result<LogQuery, Wrong> {
        LogQuery::parse(&parameters(Some(query)), now())
    }

    #[test]
    fn queries() {
        let plain = || LogQuery {
            read: ReadOptions { stop_after_tail: true, ..ReadOptions::default() },
            ..LogQuery::default()
        };
        let read = |change: fn(&mut ReadOptions)| {
            let mut query = plain();
            change(&mut query.read);
            Ok(query)
        };
        let follows = || {
            let mut query = plain();
            (query.follow, query.read.stop_after_tail) = (true, false);
            Ok(query)
        };
        let since = |text: &str| {
            let mut query = plain();
            query.read.since = Some(text.parse().unwrap());
            Ok(query)
        };
        for (query, expected) in [
            ("", Ok(plain())),
            ("follow=true", follows()),
            ("follow", follows()),
            ("follow=yes", follows()),
            ("follow=false", Ok(plain())),
            ("follow=0", Ok(plain())),
            ("previous=true", Ok(LogQuery { previous: true, ..plain() })),
            ("tailLines=3", read(|r| r.tail = Some(3))),
            ("tailLines=0", read(|r| r.tail = Some(0))),
            ("tail=3&tailLines=x", read(|r| r.tail = Some(3))),
            ("tail=all&tailLines=3", Ok(plain())),
            ("tail=&tailLines=3", read(|r| r.tail = Some(3))),
            ("limitBytes=9&limitBytes=3", read(|r| r.limit_bytes = Some(9))),
            ("timestamps=true", read(|r| r.timestamps = true)),
            ("sinceSeconds=60", since("2026-11-29T11:59:00Z")),
            ("sinceTime=2020-01-01T02:00:00%2B02:00", since("2020-01-01T00:00:00Z")),
            ("sinceTime=", Ok(plain())),
            ("tailLines=-1", Err(Wrong::Invalid)),
            ("limitBytes=0", Err(Wrong::Invalid)),
            ("sinceSeconds=0", Err(Wrong::Invalid)),
            ("sinceSeconds=5&sinceTime=2020-01-01T00:00:00Z", Err(Wrong::Invalid)),
            ("sinceSeconds=5&sinceTime=", Err(Wrong::Invalid)),
            ("stream=stdout", Err(Wrong::Invalid)),
            ("stream=", Err(Wrong::Invalid)),
            ("stream=Stdout&tailLines=3", Err(Wrong::Invalid)),
            ("tailLines=x", Err(Wrong::Undecodable)),
            ("tailLines=", Err(Wrong::Undecodable)),
            ("limitBytes=+9", Err(Wrong::Undecodable)),
            ("limitBytes=99999999999999999999", Err(Wrong::Undecodable)),
            ("sinceTime=bad", Err(Wrong::Undecodable)),
        ] {
            assert_eq!(parse(query), expected, "{query}");
        }
        let one = parse("stream=Stderr").unwrap();
        assert_eq!(one.read.stream, Some(Stream::Stderr));
        assert_eq!(
            (one.allow_streams(true), one.allow_streams(false)),
            (Ok(()), Err(Wrong::SplitStreams("Stderr".into())))
        );
        assert_eq!(parse("stream=All").unwrap().allow_streams(false), Ok(()));
    }

    #[test]
    fn which_container() {
        let ended = |id: &str| json!({"terminated": {"exitCode": 1, "containerID": id}});
        let waits = |reason: &str| json!({"waiting": {"reason": reason}});
        let runs = json!({"running": {}});
        let none = json!({});
        let not_started = "container \"c\" in pod \"p\" is waiting to start";
        let is_ended = Err("container \"c\" in pod \"p\" is terminated");
        let no_previous = Err("previous terminated container \"c\" in pod \"p\" not found");
        let pulls = format!("{not_started}: trying and failing to pull image");
        let cannot_pull = format!("{not_started}: image can't be pulled");
        let creating = format!("{not_started}: ContainerCreating");
        let unknown = format!("{not_started} - no logs yet");
        for (state, last, previous, expected) in [
            (&runs, &none, false, Ok("x://now")),
            (&runs, &ended("x://old"), false, Ok("x://now")),
            (&runs, &ended("x://old"), true, Ok("x://old")),
            (&runs, &none, true, no_previous),
            (&runs, &ended(""), true, no_previous),
            (&ended("x://now"), &none, false, Ok("x://now")),
            // The next container could not be made.
            (&ended(""), &ended("x://old"), false, Ok("x://old")),
            (&ended(""), &none, false, is_ended),
            // Between two starts.
            (&waits("CrashLoopBackOff"), &ended("x://old"), false, Ok("x://old")),
            (&waits("CrashLoopBackOff"), &ended(""), false, is_ended),
            (&waits("ImagePullBackOff"), &none, false, Err(pulls.as_str())),
            (&waits("ErrImagePull"), &none, false, Err(cannot_pull.as_str())),
            (&waits("ContainerCreating"), &none, false, Err(creating.as_str())),
            (&none, &none, false, Err(unknown.as_str())),
        ] {
            let status = json!({"name": "c", "image": "i", "imageID": "", "ready": false, "restartCount": 0,
                                "containerID": "x://now", "state": state, "lastState": last});
            for list in ["containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses"] {
                let status: PodStatus = serde_json::from_value(json!({ list: [status] })).unwrap();
                let found = container_id("p", &status, "c", previous);
                assert_eq!(found.as_deref().map_err(String::as_str), expected, "{state} {last} {previous}");
            }
        }
        let missing = container_id("p", &PodStatus::default(), "c", false);
        assert_eq!(missing.unwrap_err(), "container \"c\" in pod \"p\" is not available");
    }
}
