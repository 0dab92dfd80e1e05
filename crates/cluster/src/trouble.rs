//! What keeps every call from succeeding: told in one line for all who call, and told again when it is over.
//!
//! A dozen tasks share a client. When its certificate has expired each of them fails, again and again; nobody is helped by a line from
//! each. So the client says it, once for each cause, and they are quiet about errors of this sort
//! ([`ErrorKind::concerns_every_call`](crate::ErrorKind::concerns_every_call)).

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::ClusterError;

/// Causes that are remembered as told; a server whose answers differ each time is told no more than this.
const MAX_TOLD: usize = 16;

/// The trouble of one client.
#[derive(Debug, Default)]
pub(crate) struct Trouble {
    /// So that a call that goes well costs no lock.
    any: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    newest: Option<ClusterError>,
    told: HashSet<String>,
}

impl Trouble {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A call failed. Nothing is noted of errors that concern this call alone.
    pub(crate) fn failed(&self, server: &http::Uri, error: &ClusterError) {
        if !error.kind.concerns_every_call() {
            return;
        }
        let mut state = self.state();
        self.any.store(true, Ordering::Relaxed);
        if state.told.len() < MAX_TOLD && state.told.insert(cause(error)) {
            tracing::error!(%server, err = error.message, fix = error.advice, "The API server cannot be used, will retry");
        }
        state.newest = Some(error.clone());
    }

    /// The server answered, and knows us.
    pub(crate) fn over(&self, server: &http::Uri) {
        if !self.any.load(Ordering::Relaxed) {
            return;
        }
        *self.state() = State::default();
        self.any.store(false, Ordering::Relaxed);
        tracing::info!(%server, "The API server can be used again");
    }

    /// The newest error, while no call has succeeded since.
    pub(crate) fn newest(&self) -> Option<ClusterError> {
        self.state().newest.clone()
    }
}

/// What to do tells causes apart better than messages, of which the server may have several. Without numbers: some tell what the time is.
fn cause(error: &ClusterError) -> String {
    let text = if error.advice.is_empty() { &error.message } else { &error.advice };
    text.chars().filter(|c| !c.is_ascii_digit()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn each_cause_is_told_once_until_it_is_over() {
        let server = http::Uri::from_static("https://10.0.0.1:6443/");
        let error = |kind, message: &str| ClusterError::new("list pods", kind, message);
        let trouble = Trouble::default();
        trouble.failed(&server, &error(ErrorKind::Forbidden, "no"));
        assert_eq!(trouble.newest(), None, "it concerns one call");
        for message in ["expired at 1, now is 2", "expired at 1, now is 3", "refused", "expired at 1, now is 4"] {
            trouble.failed(&server, &error(ErrorKind::Unauthorized, message));
        }
        assert_eq!(trouble.state().told.len(), 2);
        assert_eq!(trouble.newest().map(|e| e.message), Some("expired at 1, now is 4".to_owned()));
        trouble.over(&server);
        assert_eq!(trouble.newest(), None);
        for n in 0..3 * MAX_TOLD {
            trouble.failed(&server, &error(ErrorKind::Tls, &"x".repeat(n)));
        }
        assert_eq!(trouble.state().told.len(), MAX_TOLD);
    }
}
