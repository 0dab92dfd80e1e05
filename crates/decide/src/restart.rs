//! Whether an ended container starts again: the pod's restartPolicy, the container's own, and its restartPolicyRules (KEP-5307, KEP-5532).

use model::api::{Container, ContainerRestartRule};
use model::observed::{ContainerState, ObservedPod};
use model::pod::{DesiredPod, RestartPolicy};

/// Reason that a container's status carries while all containers of its pod are started anew.
pub const RESTARTING_ALL_CONTAINERS: &str = "RestartingAllContainers";

/// Feature gates that change what restarts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RestartGates {
    /// `ContainerRestartRules`: a container's own restartPolicy and restartPolicyRules count.
    pub container_restart_rules: bool,
    /// `RestartAllContainersOnContainerExits`: the rule action RestartAllContainers counts.
    pub restart_all_containers: bool,
}

impl Default for RestartGates {
    /// Both on, as in Kubernetes 1.36.
    fn default() -> Self {
        Self { container_restart_rules: true, restart_all_containers: true }
    }
}

/// The first of the container's restartPolicyRules that matches this exit code.
pub fn matching_rule(container: &Container, exit_code: i32) -> Option<&ContainerRestartRule> {
    container.restart_policy_rules.iter().flatten().find(|rule| {
        rule.exit_codes.as_ref().is_some_and(|codes| {
            let listed = codes.values.iter().flatten().any(|v| *v == exit_code);
            match codes.operator.as_str() {
                "In" => listed,
                "NotIn" => !listed,
                _ => false,
            }
        })
    })
}

/// The restart policy that holds for this container: its own if it has one and the gate is on, else the pod's.
pub fn effective_policy(pod: &DesiredPod, container: &Container, gates: RestartGates) -> RestartPolicy {
    match container.restart_policy.as_deref() {
        Some("Always") if gates.container_restart_rules => RestartPolicy::Always,
        Some("OnFailure") if gates.container_restart_rules => RestartPolicy::OnFailure,
        Some("Never") if gates.container_restart_rules => RestartPolicy::Never,
        _ => pod.restart_policy(),
    }
}

/// True when a container that ended with this code starts again: by a matching rule, else by policy.
/// Rules count only beside a restartPolicy of the container, as the API demands. One that was stopped for its new resources starts in any case.
pub fn restarts_after_exit(pod: &DesiredPod, container: &Container, exit_code: i32, gates: RestartGates) -> bool {
    if pod.resize().restarting.contains(&container.name) {
        return true;
    }
    if gates.container_restart_rules && container.restart_policy.is_some() {
        match matching_rule(container, exit_code).map(|r| r.action.as_str()) {
            Some("Restart") => return true,
            Some("RestartAllContainers") if gates.restart_all_containers => return true,
            _ => {}
        }
    }
    match effective_policy(pod, container, gates) {
        RestartPolicy::Always => true,
        RestartPolicy::OnFailure => exit_code != 0,
        RestartPolicy::Never => false,
    }
}

/// True when a container that the kubelet itself kills (failed probe, unknown state) starts again. There is no exit code to
/// judge by, so rules do not count.
pub fn restarts_after_kill(pod: &DesiredPod, container: &Container, gates: RestartGates) -> bool {
    effective_policy(pod, container, gates) != RestartPolicy::Never
}

/// True when some rule of the pod can restart all its containers; such pods show the condition AllContainersRestarting.
pub fn could_restart_all(pod: &DesiredPod) -> bool {
    pod.init_containers()
        .chain(pod.app_containers())
        .any(|c| c.spec.restart_policy_rules.iter().flatten().any(|r| r.action == "RestartAllContainers"))
}

/// True when this exit asks for all containers of the pod to be started anew.
pub fn triggers_restart_all(container: &Container, exit_code: i32) -> bool {
    matching_rule(container, exit_code).is_some_and(|r| r.action == "RestartAllContainers")
}

/// True while the pod's containers must all be removed and started anew: the newest container of some name ended with a code whose
/// rule says so. The containers that asked for it are removed last, so this stays true until the removal is complete.
pub fn restart_all(pod: &DesiredPod, observed: &ObservedPod, gates: RestartGates) -> bool {
    gates.restart_all_containers
        && pod.init_containers().chain(pod.app_containers()).any(|c| {
            observed
                .newest(&c.spec.name)
                .is_some_and(|o| o.state == ContainerState::Exited && triggers_restart_all(c.spec, o.exit_code))
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{pod, seen};

    fn restarts(policy: &str, container: &str, code: i32, gates: RestartGates) -> bool {
        let pod = pod(&format!(r#"{{"restartPolicy":"{policy}","containers":[{{"name":"c"{container}}}]}}"#));
        let entry = pod.container("c").expect("container");
        restarts_after_exit(&pod, entry.spec, code, gates)
    }

    #[test]
    fn rules_then_own_policy_then_the_pods() {
        let on = RestartGates::default();
        for (policy, code, expected) in [
            ("Always", 0, true),
            ("Always", 1, true),
            ("OnFailure", 0, false),
            ("OnFailure", 1, true),
            ("Never", 0, false),
            ("Never", 1, false),
        ] {
            assert_eq!(restarts(policy, "", code, on), expected);
            let other = if policy == "Always" { "Never" } else { "Always" };
            assert_eq!(restarts(other, &format!(r#","restartPolicy":"{policy}""#), code, on), expected);
        }
        let rule = |action: &str, operator: &str| {
            format!(
                r#","restartPolicy":"Never","restartPolicyRules":[
                {{"action":"{action}","exitCodes":{{"operator":"{operator}","values":[42,43]}}}}]"#
            )
        };
        assert!(restarts("Never", &rule("Restart", "In"), 43, on));
        assert!(!restarts("Never", &rule("Restart", "In"), 1, on));
        assert!(restarts("Never", &rule("Restart", "NotIn"), 1, on));
        assert!(!restarts("Never", &rule("Restart", "NotIn"), 42, on));
        assert!(!restarts("Never", &rule("Restart", "Odd"), 42, on));
        assert!(restarts("Never", &rule("RestartAllContainers", "In"), 42, on));
        let no_all = RestartGates { restart_all_containers: false, ..on };
        assert!(!restarts("Never", &rule("RestartAllContainers", "In"), 42, no_all));
        let none = RestartGates { container_restart_rules: false, ..on };
        assert!(!restarts("Never", &rule("Restart", "In"), 42, none));
        assert!(restarts("Always", &rule("Restart", "In"), 42, none));
        // Rules without a policy beside them do not count.
        let bare = rule("Restart", "In").replacen(r#","restartPolicy":"Never""#, "", 1);
        assert!(!restarts("Never", &bare, 42, on));
    }

    #[test]
    fn who_asks_for_a_restart_of_all() {
        let spec = r#"{"containers":[{"name":"a","restartPolicy":"Never","restartPolicyRules":[
            {"action":"RestartAllContainers","exitCodes":{"operator":"In","values":[88]}}]},{"name":"b"}]}"#;
        let pod = pod(spec);
        assert!(could_restart_all(&pod));
        let asks = |items: &[&str], gates| restart_all(&pod, &seen(items), gates);
        let on = RestartGates::default();
        assert!(asks(&["s0 ready", "s0/a exit=88", "s0/b running"], on));
        assert!(!asks(&["s0 ready", "s0/a exit=1", "s0/b exit=88"], on));
        assert!(!asks(&["s0 ready", "s0/a exit=88", "s0/a running"], on), "only the newest run counts");
        assert!(!asks(&["s0 ready", "s0/a exit=88"], RestartGates { restart_all_containers: false, ..on }));
    }
}
