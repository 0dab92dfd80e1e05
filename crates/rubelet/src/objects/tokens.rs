//! Service account tokens for pods (TokenRequest), kept until they are due for renewal: at 80 % of their life, after 24 hours at the latest,
//! each a few seconds early by chance. When the API server does not answer, the old one serves until it ends.
//!
//! A token is good for one ServiceAccount object only. Whether the account has been deleted and made again is asked every few minutes, once for
//! all pods that use it; then the token of the new one is fetched at once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cluster::calls::AuthApi;
use cluster::reflect::Collection;
use cluster::{ErrorKind, Unit, Wall};
use decide::config::objects::account_uid;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use model::api::ServiceAccount;
use model::pod::{DesiredPod, PodUid};
use pod::objects::{ObjectError, ObjectResult, Token};
use tracing::warn;

/// The longest that a token is used without a new one.
const LONGEST: SignedDuration = SignedDuration::from_hours(24);
/// How much earlier than that, at most.
const SPREAD: f64 = 10.0;
/// When a renewal that failed is tried again.
const RETRY: SignedDuration = SignedDuration::from_secs(30);
/// How long it is taken for granted that an account is still the same object.
const SAME: SignedDuration = SignedDuration::from_mins(5);
/// For the answer about an account.
const PATIENCE: Duration = Duration::from_secs(2);
/// The same for a server that does not let a node read accounts.
const REFUSED: SignedDuration = SignedDuration::from_hours(1);

#[derive(Clone, PartialEq, Eq, Hash)]
struct Key {
    namespace: String,
    account: String,
    audience: String,
    seconds: Option<i64>,
}

/// A token, and the UID of the account that it is for, when it tells.
#[derive(Clone)]
struct Kept {
    token: Token,
    account: Option<String>,
}

/// The account as it was last seen.
struct Account {
    uid: Option<String>,
    /// When it is asked for again.
    look: Timestamp,
}

#[derive(Default)]
struct State {
    kept: HashMap<PodUid, HashMap<Key, Kept>>,
    /// By namespace and name; those of pods that are here.
    accounts: HashMap<(String, String), Account>,
}

/// The tokens of all pods.
pub(super) struct Tokens {
    auth: Arc<dyn AuthApi>,
    accounts: Arc<dyn Collection<ServiceAccount>>,
    unit: Unit,
    wall: Wall,
    state: Mutex<State>,
}

impl Tokens {
    pub(super) fn new(
        auth: Arc<dyn AuthApi>,
        accounts: Arc<dyn Collection<ServiceAccount>>,
        unit: Unit,
        wall: Wall,
    ) -> Self {
        Self { auth, accounts, unit, wall, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn forget(&self, uid: &PodUid) {
        let mut state = self.state();
        state.kept.remove(uid);
        let State { kept, accounts } = &mut *state;
        let used = |(ns, name): &(String, String)| {
            kept.values().any(|keys| keys.keys().any(|k| k.namespace == *ns && k.account == *name))
        };
        accounts.retain(|account, _| used(account));
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        let state = self.state();
        state.kept.is_empty() && state.accounts.is_empty()
    }

    /// The account was seen just now: None when it is not there, or has no UID.
    pub(super) fn seen(&self, namespace: &str, account: &str, uid: Option<&str>) {
        let look = (self.wall)().saturating_add(SAME).unwrap_or_default();
        if let Some(known) = self.state().accounts.get_mut(&(namespace.to_owned(), account.to_owned())) {
            *known = Account { uid: uid.map(str::to_owned).or(known.uid.take()), look };
        }
    }

    /// Asks whether the account is still the same object, when that has not been asked for long.
    async fn look(&self, key: &Key) {
        let now = (self.wall)();
        let of = (key.namespace.clone(), key.account.clone());
        match self.state().accounts.get_mut(&of) {
            // Others who come meanwhile do not ask as well.
            Some(known) if known.look <= now => known.look = now.saturating_add(RETRY).unwrap_or(now),
            _ => return,
        }
        let asked = self.accounts.get(Some(&key.namespace), &key.account, false);
        // The pod's volumes wait for this, and what they have is most likely right.
        match tokio::time::timeout(PATIENCE, asked).await {
            Ok(Ok(found)) => self.seen(&key.namespace, &key.account, found.metadata.uid.as_deref()),
            Ok(Err(e)) if e.kind == ErrorKind::Forbidden => {
                if let Some(known) = self.state().accounts.get_mut(&of) {
                    known.look = now.saturating_add(REFUSED).unwrap_or(now);
                }
            }
            // Away, or gone: nothing better than the old token is to be had; asked again soon.
            _ => {}
        }
    }

    /// True when the token is for another object than the account of today.
    fn strange(&self, key: &Key, kept: &Kept) -> bool {
        let state = self.state();
        let known = state.accounts.get(&(key.namespace.clone(), key.account.clone())).and_then(|a| a.uid.as_ref());
        matches!((known, &kept.account), (Some(now), Some(then)) if now != then)
    }

    /// See [`pod::objects::PodObjects::token`].
    pub(super) async fn get(&self, pod: &DesiredPod, audience: &str, seconds: Option<i64>) -> ObjectResult<Token> {
        let account = pod.spec().service_account_name.clone().unwrap_or_default();
        let key = Key { namespace: pod.namespace().to_owned(), account, audience: audience.to_owned(), seconds };
        let old = self.state().kept.get(pod.uid()).and_then(|of_pod| of_pod.get(&key)).cloned();
        if let Some(old) = &old
            && (self.wall)() < old.token.renew_at
        {
            self.look(&key).await;
            if !self.strange(&key, old) {
                return Ok(old.token.clone());
            }
        }
        let mut learned = None;
        let mut fresh = match self.request(pod, &key).await {
            Ok(token) => {
                learned = account_uid(&token.token);
                Kept { account: learned.clone(), token }
            }
            Err(reason) => match old {
                None => return Err(ObjectError::Failed(format!("failed to fetch token: {reason}"))),
                Some(old) if (self.wall)() > old.token.ends => {
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
        if fresh.token.renew_at <= now {
            fresh.token.renew_at = now.saturating_add(RETRY).unwrap_or(fresh.token.ends);
        }
        let token = fresh.token.clone();
        let mut state = self.state();
        let look = now.saturating_add(SAME).unwrap_or(now);
        let known = state.accounts.entry((key.namespace.clone(), key.account.clone()));
        let known = known.or_insert(Account { uid: None, look });
        known.uid = learned.or(known.uid.take());
        state.kept.entry(pod.uid().clone()).or_default().insert(key, fresh);
        Ok(token)
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
