//! Service account tokens for pods (TokenRequest), kept until they are due for renewal: at 80 % of their life, after 24 hours at the latest,
//! each a few seconds early by chance. When the API server does not answer, the old one serves until it ends.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cluster::calls::AuthApi;
use cluster::{Unit, Wall};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use model::pod::{DesiredPod, PodUid};
use pod::objects::{ObjectError, ObjectResult, Token};
use tracing::warn;

/// The longest that a token is used without a new one.
const LONGEST: SignedDuration = SignedDuration::from_hours(24);
/// How much earlier than that, at most.
const SPREAD: f64 = 10.0;
/// When a renewal that failed is tried again.
const RETRY: SignedDuration = SignedDuration::from_secs(30);

#[derive(Clone, PartialEq, Eq, Hash)]
struct Key {
    account: String,
    audience: String,
    seconds: Option<i64>,
}

/// The tokens of all pods.
pub(super) struct Tokens {
    auth: Arc<dyn AuthApi>,
    unit: Unit,
    wall: Wall,
    kept: Mutex<HashMap<PodUid, HashMap<Key, Token>>>,
}

impl Tokens {
    pub(super) fn new(auth: Arc<dyn AuthApi>, unit: Unit, wall: Wall) -> Self {
        Self { auth, unit, wall, kept: Mutex::default() }
    }

    fn kept(&self) -> MutexGuard<'_, HashMap<PodUid, HashMap<Key, Token>>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn forget(&self, uid: &PodUid) {
        self.kept().remove(uid);
    }

    /// See [`pod::objects::PodObjects::token`].
    pub(super) async fn get(&self, pod: &DesiredPod, audience: &str, seconds: Option<i64>) -> ObjectResult<Token> {
        let account = pod.spec().service_account_name.clone().unwrap_or_default();
        let key = Key { account, audience: audience.to_owned(), seconds };
        let old = self.kept().get(pod.uid()).and_then(|of_pod| of_pod.get(&key)).cloned();
        if let Some(old) = &old
            && (self.wall)() < old.renew_at
        {
            return Ok(old.clone());
        }
        let mut fresh = match self.request(pod, &key).await {
            Ok(fresh) => fresh,
            Err(reason) => match old {
                None => return Err(ObjectError::Failed(format!("failed to fetch token: {reason}"))),
                Some(old) if (self.wall)() > old.ends => {
                    return Err(ObjectError::Failed(format!(
                        "token {} expired and refresh failed: {reason}",
                        shown(&key, pod)
                    )));
                }
                Some(old) => {
                    warn!(pod = pod.full_name(), uid = %pod.uid(), account = key.account, err = reason, "Couldn't update token");
                    old
                }
            },
        };
        let now = (self.wall)();
        if fresh.renew_at <= now {
            fresh.renew_at = now.saturating_add(RETRY).unwrap_or(fresh.ends);
        }
        self.kept().entry(pod.uid().clone()).or_default().insert(key, fresh.clone());
        Ok(fresh)
    }

    async fn request(&self, pod: &DesiredPod, key: &Key) -> Result<Token, String> {
        let request = TokenRequest {
            spec: Some(TokenRequestSpec {
                audiences: (!key.audience.is_empty()).then(|| vec![key.audience.clone()]),
                expiration_seconds: key.seconds,
                bound_object_ref: Some(BoundObjectReference {
                    api_version: Some("v1".to_owned()),
                    kind: Some("Pod".to_owned()),
                    name: Some(pod.name().to_owned()),
                    uid: Some(pod.uid().to_string()),
                }),
            }),
            ..TokenRequest::default()
        };
        let answer = self.auth.request_token(pod.namespace(), &key.account, &request).await.map_err(|e| e.message)?;
        let status = answer.status.unwrap_or_default();
        let (Some(token), Some(ends)) = (status.token, status.expiration_timestamp) else {
            return Err("the API server's answer has no token".to_owned());
        };
        let seconds = answer.spec.and_then(|s| s.expiration_seconds);
        let renew_at = renew_at(ends.0, seconds, (self.unit)() * SPREAD);
        Ok(Token { token, renew_at, ends: ends.0 })
    }
}

/// How messages name a token.
fn shown(key: &Key, pod: &DesiredPod) -> String {
    format!("{:?}/{:?} of pod {}", key.account, pod.namespace(), pod.uid())
}

/// When a token that ends then and was asked for so many seconds is due. Without a length it is never renewed early.
fn renew_at(ends: Timestamp, seconds: Option<i64>, early: f64) -> Timestamp {
    let Some(seconds) = seconds else { return ends };
    let life = SignedDuration::from_secs(seconds);
    let early = SignedDuration::try_from_secs_f64(early).unwrap_or_default();
    let part = life.checked_mul(4).map_or(LONGEST, |four| four / 5);
    let begun = ends.saturating_sub(life).unwrap_or(ends);
    begun.saturating_add(part.min(LONGEST) - early).unwrap_or(ends)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renewal_is_due() {
        let begun: Timestamp = "2026-11-29T00:00:00Z".parse().unwrap();
        for (seconds, early, due) in [
            (3600, 0.0, "2026-11-29T00:48:00Z"),
            (3607, 10.0, "2026-11-29T00:47:55.6Z"),
            (600, 0.0, "2026-11-29T00:08:00Z"),
            (86_400 * 30, 0.0, "2026-11-30T00:00:00Z"),
            (86_400 * 30, 10.0, "2026-11-29T23:59:50Z"),
        ] {
            let ends = begun + SignedDuration::from_secs(seconds);
            assert_eq!(renew_at(ends, Some(seconds), early).to_string(), due, "{seconds} {early}");
        }
        assert_eq!(renew_at(begun, None, 0.0), begun);
    }
}
