//! The API server, and who this node is to it.

use jiff::{SignedDuration, Timestamp};

use super::super::facts::{ClusterFacts, ClusterState};
use super::{Finding, error, ok, unknown, warn};

const TOPIC: &str = "API server";
/// Clocks further apart than this break the checks of certificates and tokens sooner or later.
const SKEW: SignedDuration = SignedDuration::from_secs(30);
/// A client certificate that ends within this time and is not renewed needs somebody soon.
const SOON: SignedDuration = SignedDuration::from_hours(7 * 24);

pub(super) fn judge(facts: Option<&ClusterFacts>, rotates: bool, now: Timestamp) -> Vec<Finding> {
    let Some(facts) = facts else { return Vec::new() };
    let path = facts.path.display();
    let server = &facts.server;
    let advice =
        |e: &cluster::ClusterError, otherwise: String| if e.advice.is_empty() { otherwise } else { e.advice.clone() };
    match &facts.state {
        ClusterState::Unusable(e) => {
            let fix = advice(
                e,
                format!("write a valid kubeconfig to {path}, or leave --kubeconfig out for a standalone node"),
            );
            vec![error(TOPIC, format!("{path} cannot be used: {}", e.message), fix)]
        }
        ClusterState::NoName(why) => vec![unknown(TOPIC, why)],
        ClusterState::Refused(e) => {
            let fix = advice(e, format!("look at the server and at the way to it; {path} names {server}"));
            vec![error(TOPIC, format!("{server}: {}: {}", e.action, e.message), fix)]
        }
        ClusterState::Answers { registered, bootstrap, skew, expires } => {
            let what = match (registered, bootstrap) {
                (true, _) => "answers and knows this node",
                (false, false) => "answers; this node is not registered yet",
                (false, true) => "answers; this node will ask it for a client certificate",
            };
            let mut found = vec![ok(TOPIC, format!("{server} {what}"))];
            if skew.abs() > SKEW {
                let text = format!("the API server's clock is {} s ahead of this host's", skew.as_secs());
                found.push(warn("clock", text, "keep both clocks right (chrony, systemd-timesyncd)"));
            }
            if let Some(at) = expires.filter(|at| !rotates && at.duration_since(now) < SOON) {
                let text = format!("the client certificate ends {at} and is not renewed");
                found.push(warn(
                    "client certificate",
                    text,
                    "set rotateCertificates: true, or write a new one into the kubeconfig",
                ));
            }
            found
        }
    }
}

#[cfg(test)]
mod tests {
    use cluster::{ClusterError, ErrorKind};
    use model::report::Severity;

    use super::*;

    fn facts(state: ClusterState) -> ClusterFacts {
        ClusterFacts { path: "/etc/kubernetes/kubelet.conf".into(), server: "https://10.0.0.1:6443/".into(), state }
    }

    fn answers(skew: i64, expires: Option<Timestamp>) -> ClusterState {
        let skew = SignedDuration::from_secs(skew);
        ClusterState::Answers { registered: true, bootstrap: false, skew, expires }
    }

    fn told(state: ClusterState, rotates: bool) -> Vec<(Severity, String)> {
        let found = judge(Some(&facts(state)), rotates, Timestamp::UNIX_EPOCH);
        found.into_iter().map(|f| (f.severity, format!("{}: {} | {}", f.topic, f.message, f.fix))).collect()
    }

    #[test]
    fn standalone_has_none() {
        assert!(judge(None, false, Timestamp::UNIX_EPOCH).is_empty());
    }

    #[test]
    fn a_good_one() {
        let found = told(answers(1, None), false);
        assert_eq!(found, [(Severity::Ok, "API server: https://10.0.0.1:6443/ answers and knows this node | ".into())]);
    }

    #[test]
    fn clocks_apart_and_a_certificate_that_ends() {
        let soon = Timestamp::UNIX_EPOCH + SignedDuration::from_hours(24);
        let found = told(answers(-90, Some(soon)), false);
        assert_eq!(found.len(), 3);
        assert!(found[1].1.contains("-90 s ahead") && found[1].0 == Severity::Warning, "{found:?}");
        assert!(found[2].1.contains("1970-01-02T00:00:00Z and is not renewed"), "{found:?}");
        assert_eq!(told(answers(0, Some(soon)), true).len(), 1, "it is renewed");
    }

    #[test]
    fn what_is_wrong_comes_with_what_to_do() {
        let refused = ClusterError::from_answer("get node n1", 401, None, b"");
        let found = told(ClusterState::Refused(refused), false);
        assert_eq!(found[0].0, Severity::Error);
        assert!(
            found[0].1.contains("get node n1") && found[0].1.contains("renew the token or client certificate"),
            "{found:?}"
        );
        let down = ClusterError::new("get node n1", ErrorKind::Unreachable, "connection refused");
        let found = told(ClusterState::Refused(down), false);
        assert!(found[0].1.contains("connection refused | look at the server and at the way to it"), "{found:?}");
    }
}
