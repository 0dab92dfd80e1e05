//! The healthz port (`healthzBindAddress`, `healthzPort`, 127.0.0.1:10248): `/healthz` and nothing else.

use http::{Method, Uri};

use crate::health::{Checks, Health};
use crate::reply::{Answer, not_found};
use crate::server::Handler;

pub(crate) struct Healthz {
    pub(crate) health: Health,
    pub(crate) checks: Checks,
}

impl Handler for Healthz {
    fn handle(&self, _: &Method, uri: &Uri, _: &http::HeaderMap) -> Answer {
        Answer::Now(self.health.answer(uri, self.checks).unwrap_or_else(not_found))
    }
}
