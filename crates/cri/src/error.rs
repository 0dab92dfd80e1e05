//! How gRPC's ways of failing become [`Outcome`]s.

use std::error::Error;

use tonic::{Code, Status};

use crate::port::{CriError, Outcome};

/// What tonic says when an answer is larger than the receive limit. It shares its code with answers of the runtime.
const TOO_LARGE: &str = "Error, decoded message length too large: found ";

impl CriError {
    /// An error that the runtime itself answered.
    pub fn answered(call: &'static str, target: &str, code: i32, message: impl Into<String>) -> Self {
        let outcome = match Code::from_i32(code) {
            Code::NotFound => Outcome::NotFound,
            Code::Unimplemented => Outcome::Unimplemented,
            Code::ResourceExhausted => Outcome::ResourceExhausted,
            // Unavailable is also what containerd answers when it lost its shim in the middle.
            Code::DeadlineExceeded | Code::Cancelled | Code::Unavailable => Outcome::Unknown,
            _ => Outcome::Failed,
        };
        Self { call, target: target.into(), outcome, code, message: message.into() }
    }

    /// No answer came in time.
    pub fn timed_out(call: &'static str, target: &str) -> Self {
        Self::answered(call, target, Code::DeadlineExceeded as i32, "context deadline exceeded")
    }

    /// The connection was lost before the answer came.
    pub fn lost(call: &'static str, target: &str, cause: &str) -> Self {
        Self::answered(call, target, Code::Unavailable as i32, format!("error reading from server: {cause}"))
    }

    /// The call was never sent.
    pub fn unreachable(call: &'static str, target: &str, message: impl Into<String>) -> Self {
        let code = Code::Unavailable as i32;
        Self { call, target: target.into(), outcome: Outcome::Unreachable, code, message: message.into() }
    }

    /// The answer is too large by these figures, in bytes.
    pub fn too_large(call: &'static str, target: &str, size: &str, limit: usize) -> Self {
        let message = format!("grpc: received message larger than max ({size} vs. {limit})");
        Self::answered(call, target, Code::ResourceExhausted as i32, message)
    }

    /// The runtime answered without error, but what it answered cannot be used.
    pub(crate) fn malformed(call: &'static str, target: &str, message: impl Into<String>) -> Self {
        let code = Code::Ok as i32;
        Self { call, target: target.into(), outcome: Outcome::Failed, code, message: message.into() }
    }

    /// From a failed call as tonic shows it.
    pub(crate) fn from_status(call: &'static str, target: &str, status: &Status) -> Self {
        // Only errors made on this side have a source.
        let causes = || std::iter::successors(status.source(), |&error| error.source());
        if causes().any(|error| error.is::<tonic::ConnectError>()) {
            return Self::unreachable(call, target, status.message());
        }
        if causes().any(|error| error.is::<tonic::TimeoutExpired>()) {
            return Self::timed_out(call, target);
        }
        if let Some(cause) = causes().last() {
            return Self::lost(call, target, &cause.to_string());
        }
        if let Some(figures) = status.message().strip_prefix(TOO_LARGE) {
            let size = figures.split(' ').next().unwrap_or_default();
            return Self::too_large(call, target, size, crate::client::MAX_ANSWER);
        }
        Self::answered(call, target, status.code() as i32, status.message())
    }

    /// The error as Go prints a gRPC error: `rpc error: code = Unknown desc = …`. It stands so in many event texts; others
    /// carry the bare [`message`](Self::message).
    pub fn rpc_text(&self) -> String {
        let name = match Code::from_i32(self.code) {
            // Not gRPC's: the client refused the answer.
            Code::Ok => return self.message.clone(),
            Code::Cancelled => "Canceled",
            Code::Unknown => "Unknown",
            Code::InvalidArgument => "InvalidArgument",
            Code::DeadlineExceeded => "DeadlineExceeded",
            Code::NotFound => "NotFound",
            Code::AlreadyExists => "AlreadyExists",
            Code::PermissionDenied => "PermissionDenied",
            Code::ResourceExhausted => "ResourceExhausted",
            Code::FailedPrecondition => "FailedPrecondition",
            Code::Aborted => "Aborted",
            Code::OutOfRange => "OutOfRange",
            Code::Unimplemented => "Unimplemented",
            Code::Internal => "Internal",
            Code::Unavailable => "Unavailable",
            Code::DataLoss => "DataLoss",
            Code::Unauthenticated => "Unauthenticated",
        };
        format!("rpc error: code = {name} desc = {}", self.message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_of_answers() {
        for (status, outcome, text) in [
            (Status::not_found("no x"), Outcome::NotFound, "rpc error: code = NotFound desc = no x"),
            (
                Status::unimplemented("unknown method"),
                Outcome::Unimplemented,
                "rpc error: code = Unimplemented desc = unknown method",
            ),
            (Status::unknown("failed"), Outcome::Failed, "rpc error: code = Unknown desc = failed"),
            (
                Status::deadline_exceeded("context deadline exceeded"),
                Outcome::Unknown,
                "rpc error: code = DeadlineExceeded desc = context deadline exceeded",
            ),
            (Status::cancelled("gone"), Outcome::Unknown, "rpc error: code = Canceled desc = gone"),
            (Status::unavailable("shim gone"), Outcome::Unknown, "rpc error: code = Unavailable desc = shim gone"),
            (Status::out_of_range("x"), Outcome::Failed, "rpc error: code = OutOfRange desc = x"),
            (
                Status::out_of_range(
                    "Error, decoded message length too large: found 17000000 bytes, the limit is: 16777216 bytes",
                ),
                Outcome::ResourceExhausted,
                "rpc error: code = ResourceExhausted desc = grpc: received message larger than max (17000000 vs. 16777216)",
            ),
        ] {
            let error = CriError::from_status("StopContainer", "abc", &status);
            assert_eq!((error.outcome, error.rpc_text().as_str()), (outcome, text));
        }
        assert_eq!(
            CriError::malformed("RunPodSandbox", "", "PodSandboxId is not set for sandbox").rpc_text(),
            "PodSandboxId is not set for sandbox"
        );
    }
}
