//! Refusals, with the texts that Go shows.

use model::pod::{DesiredPod, PodSource};
use model::quantity::Quantity;
use proptest::prelude::*;

use super::*;
use crate::testing::{pod_from, pod_with};

fn rules() -> Rules {
    Rules {
        sysctls: SysctlAllowlist::new(Some("6.8.0-generic"), &[]).expect("sysctls"),
        apparmor_error: None,
        pod_level_resources: true,
        toleration_comparison: false,
        shutting_down: false,
        resize: Default::default(),
    }
}

fn node() -> NodeFacts {
    let q = |s: &str| Quantity::parse(s).expect("quantity");
    NodeFacts {
        name: "node-a".into(),
        labels: [("kubernetes.io/os", "linux"), ("disk", "ssd"), ("cores", "8")]
            .map(|(k, v)| (k.to_owned(), v.to_owned()))
            .into(),
        allocatable: [("cpu", "2"), ("memory", "1Gi"), ("ephemeral-storage", "10Gi"), ("pods", "3"), ("x.io/gpu", "1")]
            .map(|(k, v)| (k.to_owned(), q(v)))
            .into(),
        ..Default::default()
    }
}

fn api(uid: &str, spec: &str) -> DesiredPod {
    pod_with(&format!(r#"{{"uid":"{uid}","name":"{uid}"}}"#), spec)
}

fn asks(uid: &str, requests: &str) -> DesiredPod {
    api(uid, &format!(r#"{{"containers":[{{"name":"c","resources":{{"requests":{requests}}}}}]}}"#))
}

/// `REASON: MESSAGE` of the refusal, or `ok`.
fn judge(ledger: &mut Ledger, pod: &DesiredPod, node: &NodeFacts, rules: &Rules) -> String {
    match ledger.admit(pod, node, rules) {
        Ok(a) if a.preempt.is_empty() => "ok".into(),
        Ok(a) => format!("preempts {:?}", a.preempt),
        Err(r) => format!("{}: {}", r.reason, r.message),
    }
}

fn alone(spec: &str) -> String {
    judge(&mut Ledger::default(), &api("a", spec), &node(), &rules())
}

#[test]
fn resources_are_counted_and_given_back() {
    let mut ledger = Ledger::default();
    let (node, rules) = (node(), rules());
    let first = asks("a", r#"{"cpu":"1500m","memory":"512Mi"}"#);
    assert_eq!(judge(&mut ledger, &first, &node, &rules), "ok");
    assert_eq!((ledger.usage().get("cpu"), ledger.usage().get("memory")), (1500, 512 << 20));
    let second = asks("b", r#"{"cpu":"600m"}"#);
    assert_eq!(
        judge(&mut ledger, &second, &node, &rules),
        "OutOfcpu: Node didn't have enough resource: cpu, requested: 600, used: 1500, capacity: 2000"
    );
    // What was refused holds nothing.
    assert!(!ledger.holds(second.uid()));
    assert_eq!(judge(&mut ledger, &asks("c", r#"{"cpu":"500m"}"#), &node, &rules), "ok");
    // Judged again, a pod does not count against itself.
    assert_eq!(judge(&mut ledger, &first, &node, &rules), "ok");
    ledger.release(first.uid());
    ledger.release(first.uid());
    assert_eq!(judge(&mut ledger, &second, &node, &rules), "ok");
    assert_eq!(
        judge(&mut ledger, &asks("d", r#"{"memory":"2Gi"}"#), &node, &rules),
        "OutOfmemory: Node didn't have enough resource: memory, requested: 2147483648, used: 0, capacity: 1073741824"
    );
    assert_eq!(judge(&mut ledger, &asks("d", "{}"), &node, &rules), "ok");
    assert_eq!(
        judge(&mut ledger, &asks("e", "{}"), &node, &rules),
        "OutOfpods: Node didn't have enough resource: pods, requested: 1, used: 3, capacity: 3"
    );
    for pod in ["b", "c", "d"] {
        ledger.release(asks(pod, "{}").uid());
    }
    assert_eq!(ledger, Ledger::default());
}

#[test]
fn other_resources() {
    let spec = |r: &str| format!(r#"{{"containers":[{{"name":"c","resources":{{"requests":{r}}}}}]}}"#);
    assert_eq!(
        alone(&spec(r#"{"ephemeral-storage":"11Gi"}"#)),
        "OutOfephemeral-storage: Node didn't have enough resource: ephemeral-storage, requested: 11811160064, used: 0, capacity: 10737418240"
    );
    assert_eq!(
        alone(&spec(r#"{"x.io/gpu":"2"}"#)),
        "OutOfx.io/gpu: Node didn't have enough resource: x.io/gpu, requested: 2, used: 0, capacity: 1"
    );
    // An extended resource that the node does not know is somebody else's.
    assert_eq!(alone(&spec(r#"{"y.io/gpu":"2"}"#)), "ok");
    assert_eq!(
        alone(&spec(r#"{"hugepages-2Mi":"4Mi"}"#)),
        "OutOfhugepages-2Mi: Node didn't have enough resource: hugepages-2Mi, requested: 4194304, used: 0, capacity: 0"
    );
}

#[test]
fn host_ports() {
    let with = |uid: &str, port: &str| api(uid, &format!(r#"{{"containers":[{{"name":"c","ports":[{port}]}}]}}"#));
    let (node, rules) = (node(), rules());
    let refused = "NodePorts: Predicate NodePorts failed: node(s) didn't have free ports for the requested pod ports";
    for (other, expected) in [
        (r#"{"containerPort":80,"hostPort":80}"#, refused),
        (r#"{"containerPort":81,"hostPort":80,"hostIP":"10.0.0.1"}"#, refused),
        (r#"{"containerPort":80,"hostPort":80,"protocol":"UDP"}"#, "ok"),
        (r#"{"containerPort":80,"hostPort":81}"#, "ok"),
        (r#"{"containerPort":80}"#, "ok"),
    ] {
        let mut ledger = Ledger::default();
        assert_eq!(judge(&mut ledger, &with("a", r#"{"containerPort":80,"hostPort":80}"#), &node, &rules), "ok");
        assert_eq!(judge(&mut ledger, &with("b", other), &node, &rules), expected, "{other}");
        ledger.release(with("a", "").uid());
        assert_eq!(judge(&mut ledger, &with("b", other), &node, &rules), "ok");
    }
    let mut ledger = Ledger::default();
    let ip = |ip: &str| format!(r#"{{"containerPort":80,"hostPort":80,"hostIP":"{ip}"}}"#);
    assert_eq!(judge(&mut ledger, &with("a", &ip("10.0.0.1")), &node, &rules), "ok");
    assert_eq!(judge(&mut ledger, &with("b", &ip("10.0.0.2")), &node, &rules), "ok");
    assert_eq!(judge(&mut ledger, &with("c", &ip("10.0.0.2")), &node, &rules), refused);
    // Plain init containers hold no ports, sidecars do.
    let init = |policy: &str| {
        api(
            "i",
            &format!(r#"{{"initContainers":[{{"name":"i"{policy},"ports":[{}]}}],"containers":[]}}"#, ip("10.0.0.1")),
        )
    };
    assert_eq!(judge(&mut ledger, &init(""), &node, &rules), "ok");
    assert_eq!(judge(&mut ledger, &init(r#","restartPolicy":"Always""#), &node, &rules), refused);
}

#[test]
fn node_selection() {
    let refused = "NodeAffinity: Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector";
    assert_eq!(alone(r#"{"nodeSelector":{"disk":"ssd"},"containers":[]}"#), "ok");
    assert_eq!(alone(r#"{"nodeSelector":{"disk":"hdd"},"containers":[]}"#), refused);
    let term = |t: &str| {
        alone(&format!(
            r#"{{"containers":[],"affinity":{{"nodeAffinity":{{"requiredDuringSchedulingIgnoredDuringExecution":{{"nodeSelectorTerms":[{t}]}}}}}}}}"#
        ))
    };
    for (expression, matches) in [
        (r#"{"key":"disk","operator":"In","values":["hdd","ssd"]}"#, true),
        (r#"{"key":"disk","operator":"In","values":["hdd"]}"#, false),
        (r#"{"key":"disk","operator":"NotIn","values":["hdd"]}"#, true),
        (r#"{"key":"none","operator":"NotIn","values":["hdd"]}"#, true),
        (r#"{"key":"disk","operator":"NotIn","values":["ssd"]}"#, false),
        (r#"{"key":"disk","operator":"Exists"}"#, true),
        (r#"{"key":"none","operator":"Exists"}"#, false),
        (r#"{"key":"none","operator":"DoesNotExist"}"#, true),
        (r#"{"key":"disk","operator":"DoesNotExist"}"#, false),
        (r#"{"key":"cores","operator":"Gt","values":["4"]}"#, true),
        (r#"{"key":"cores","operator":"Gt","values":["8"]}"#, false),
        (r#"{"key":"cores","operator":"Lt","values":["9"]}"#, true),
        (r#"{"key":"disk","operator":"Lt","values":["9"]}"#, false),
        (r#"{"key":"disk","operator":"Like","values":["s"]}"#, false),
    ] {
        let expected = if matches { "ok" } else { refused };
        assert_eq!(term(&format!(r#"{{"matchExpressions":[{expression}]}}"#)), expected, "{expression}");
    }
    let field = |op: &str, v: &str| {
        format!(r#"{{"matchFields":[{{"key":"metadata.name","operator":"{op}","values":["{v}"]}}]}}"#)
    };
    assert_eq!(term(&field("In", "node-a")), "ok");
    assert_eq!(term(&field("In", "node-b")), refused);
    assert_eq!(term(&field("NotIn", "node-b")), "ok");
    // Terms are alternatives, and an empty one matches nothing.
    assert_eq!(term("{}"), refused);
    assert_eq!(term(&format!("{{}},{}", field("In", "node-a"))), "ok");
    assert_eq!(
        alone(r#"{"nodeName":"node-b","containers":[]}"#),
        "NodeName: Predicate NodeName failed: node(s) didn't match the requested node name"
    );
}

#[test]
fn taints() {
    let taint =
        |effect: &str| Taint { key: "k".into(), value: Some("5".into()), effect: effect.into(), ..Default::default() };
    let mut tainted = node();
    tainted.taints = vec![taint("NoExecute")];
    let refused = "TaintToleration: Predicate TaintToleration failed: node(s) had taints that the pod didn't tolerate";
    let of = |toleration: &str, rules: &Rules, node: &NodeFacts| {
        let pod = api("a", &format!(r#"{{"containers":[],"tolerations":[{toleration}]}}"#));
        judge(&mut Ledger::default(), &pod, node, rules)
    };
    assert_eq!(of("", &rules(), &tainted), refused);
    assert_eq!(of(r#"{"operator":"Exists"}"#, &rules(), &tainted), "ok");
    assert_eq!(of(r#"{"key":"k","value":"5"}"#, &rules(), &tainted), "ok");
    assert_eq!(of(r#"{"key":"k","value":"6"}"#, &rules(), &tainted), refused);
    assert_eq!(of(r#"{"key":"k","operator":"Exists","effect":"NoSchedule"}"#, &rules(), &tainted), refused);
    let gt = r#"{"key":"k","operator":"Gt","value":"4"}"#;
    assert_eq!(of(gt, &rules(), &tainted), refused);
    assert_eq!(of(gt, &Rules { toleration_comparison: true, ..rules() }, &tainted), "ok");
    let mut soft = node();
    soft.taints = vec![taint("NoSchedule")];
    assert_eq!(of("", &rules(), &soft), "ok");
    let fixed = pod_from(PodSource::File, "{}", r#"{"containers":[]}"#);
    assert_eq!(judge(&mut Ledger::default(), &fixed, &tainted, &rules()), "ok");
}

#[test]
fn operating_system_and_groups() {
    let labelled = pod_with(r#"{"labels":{"kubernetes.io/os":"windows"}}"#, r#"{"containers":[]}"#);
    assert_eq!(
        judge(&mut Ledger::default(), &labelled, &node(), &rules()),
        "PodOSSelectorNodeLabelDoesNotMatch: Failed to admit pod as the `kubernetes.io/os` label doesn't match node label"
    );
    assert_eq!(
        alone(r#"{"os":{"name":"windows"},"containers":[]}"#),
        "PodOSNotSupported: Failed to admit pod as the OS field doesn't match node OS"
    );
    let strict = r#"{"securityContext":{"supplementalGroupsPolicy":"Strict"},"containers":[]}"#;
    assert_eq!(
        alone(strict),
        "SupplementalGroupsPolicyNotSupported: SupplementalGroupsPolicy=Strict is not supported in this node"
    );
    let able = NodeFacts { supplemental_groups_policy: true, ..node() };
    assert_eq!(judge(&mut Ledger::default(), &api("a", strict), &able, &rules()), "ok");
}

#[test]
fn sysctls() {
    let of = |name: &str, more: &str, list: &SysctlAllowlist| {
        let spec =
            format!(r#"{{"containers":[],{more}"securityContext":{{"sysctls":[{{"name":"{name}","value":"1"}}]}}}}"#);
        judge(&mut Ledger::default(), &api("a", &spec), &node(), &Rules { sysctls: list.clone(), ..rules() })
    };
    let new = SysctlAllowlist::new(Some("5.10.0"), &[]).expect("list");
    assert_eq!(of("net.ipv4.tcp_syncookies", "", &new), "ok");
    assert_eq!(of("net/ipv4/tcp_syncookies", "", &new), "ok");
    assert_eq!(of("net.ipv4.tcp_rmem", "", &new), "ok");
    assert_eq!(of("kernel.msgmax", "", &new), "SysctlForbidden: forbidden sysctl: \"kernel.msgmax\" not allowlisted");
    assert_eq!(
        of("net.ipv4.tcp_syncookies", r#""hostNetwork":true,"#, &new),
        "SysctlForbidden: forbidden sysctl: \"net.ipv4.tcp_syncookies\" not allowed with host Net enabled"
    );
    assert_eq!(
        of("kernel.shm_rmid_forced", r#""hostIPC":true,"#, &new),
        "SysctlForbidden: forbidden sysctl: \"kernel.shm_rmid_forced\" not allowed with host IPC enabled"
    );
    let old = SysctlAllowlist::new(Some("4.14.1"), &[]).expect("list");
    assert!(of("net.ipv4.tcp_rmem", "", &old).starts_with("SysctlForbidden"));
    assert_eq!(of("net.ipv4.tcp_fin_timeout", "", &old), "ok");
    assert!(of("net.ipv4.tcp_fin_timeout", "", &SysctlAllowlist::new(None, &[]).expect("list")).starts_with("Sysctl"));
    let allowed = |patterns: &[&str]| {
        SysctlAllowlist::new(Some("5.10"), &patterns.iter().map(|p| (*p).to_owned()).collect::<Vec<_>>())
    };
    let wide = allowed(&["kernel.msg*", "net.core.somaxconn", "fs.mqueue.*"]).expect("list");
    assert_eq!(of("kernel.msgmax", "", &wide), "ok");
    assert_eq!(of("fs.mqueue.msg_max", "", &wide), "ok");
    assert_eq!(of("net.core.somaxconn", "", &wide), "ok");
    assert!(of("net.core.rmem_max", "", &wide).starts_with("SysctlForbidden"));
    assert!(of("kernel.msgmax", r#""hostIPC":true,"#, &wide).ends_with("not allowed with host IPC enabled"));
    assert_eq!(
        allowed(&["vm.swappiness"]).expect_err("not namespaced").to_string(),
        "the sysctls \"vm.swappiness\" are not known to be namespaced"
    );
    for bad in ["", "net.*.x", "net..x", "Net.x", "-net.x"] {
        assert!(matches!(allowed(&[bad]), Err(SysctlPatternError::Malformed(_))), "{bad}");
    }
    assert_eq!(sysctl::sysctl_name("net/ipv4/conf/eth0.1/forwarding"), "net.ipv4.conf.eth0/1.forwarding");
    assert_eq!(sysctl::sysctl_name("net.ipv4.conf.eth0/1.forwarding"), "net.ipv4.conf.eth0/1.forwarding");
}

#[test]
fn pressure_turns_away_all_but_critical_ones() {
    let under = |list: &[&str]| NodeFacts { pressures: list.iter().map(|p| (*p).to_owned()).collect(), ..node() };
    let of = |pod: &DesiredPod, n: &NodeFacts| judge(&mut Ledger::default(), pod, n, &rules());
    let best_effort = asks("a", "{}");
    let burstable = asks("a", r#"{"cpu":"1"}"#);
    let memory = under(&["MemoryPressure"]);
    let both = under(&["DiskPressure", "MemoryPressure"]);
    assert_eq!(of(&best_effort, &memory), "Evicted: The node had condition: [MemoryPressure]. ");
    assert_eq!(of(&burstable, &memory), "ok");
    assert_eq!(of(&burstable, &both), "Evicted: The node had condition: [DiskPressure MemoryPressure]. ");
    let tolerant = api(
        "a",
        r#"{"containers":[],"tolerations":[{"key":"node.kubernetes.io/memory-pressure","operator":"Exists"}]}"#,
    );
    assert_eq!(of(&tolerant, &memory), "ok");
    assert_eq!(of(&pod_from(PodSource::File, "{}", r#"{"containers":[]}"#), &both), "ok");
    // One that runs already, under an earlier agent, is not turned away.
    let with_phase = |phase: &str| {
        let mut object = best_effort.to_pod();
        object.status = Some(model::api::PodStatus { phase: Some(phase.into()), ..Default::default() });
        DesiredPod::new(object, PodSource::Api).unwrap()
    };
    assert_eq!(of(&with_phase("Running"), &both), "ok");
    assert!(of(&with_phase("Pending"), &both).starts_with("Evicted: "));
}

#[test]
fn apparmor_levels_and_shutdown() {
    let profile = r#"{"containers":[{"name":"c","securityContext":{"appArmorProfile":{"type":"RuntimeDefault"}}}]}"#;
    let without = Rules { apparmor_error: Some("AppArmor is not enabled on the host".into()), ..rules() };
    let of = |pod: &DesiredPod, rules: &Rules| judge(&mut Ledger::default(), pod, &node(), rules);
    assert_eq!(
        of(&api("a", profile), &without),
        "AppArmor: Cannot enforce AppArmor: AppArmor is not enabled on the host"
    );
    assert_eq!(of(&api("a", profile), &rules()), "ok");
    assert_eq!(of(&api("a", r#"{"containers":[{"name":"c"}]}"#), &without), "ok");
    assert_eq!(of(&api("a", &profile.replace("RuntimeDefault", "Unconfined")), &without), "ok");
    let annotated = |v: &str| {
        let key = "container.apparmor.security.beta.kubernetes.io/c";
        pod_with(&format!(r#"{{"annotations":{{"{key}":"{v}"}}}}"#), r#"{"containers":[{"name":"c"}]}"#)
    };
    assert!(of(&annotated("runtime/default"), &without).starts_with("AppArmor"));
    assert_eq!(of(&annotated("unconfined"), &without), "ok");
    assert_eq!(
        of(&annotated("localhost/"), &rules()),
        "AppArmor: Cannot enforce AppArmor: invalid empty AppArmor profile name"
    );
    let level = r#"{"resources":{"requests":{"cpu":"1"}},"containers":[]}"#;
    assert_eq!(
        of(&api("a", level), &Rules { pod_level_resources: false, ..rules() }),
        "PodLevelResourcesNotSupported: PodLevelResources feature gate is disabled"
    );
    assert_eq!(of(&api("a", level), &rules()), "ok");
    assert_eq!(
        of(&api("a", level), &Rules { shutting_down: true, ..rules() }),
        "NodeShutdown: Pod was rejected as the node is shutting down."
    );
}

#[test]
fn the_first_refusal_wins() {
    let spec = r#"{"nodeName":"other","containers":[{"name":"c","resources":{"requests":{"cpu":"9"}}}],
        "securityContext":{"sysctls":[{"name":"vm.x","value":"1"}]}}"#;
    assert!(alone(spec).starts_with("SysctlForbidden"));
    assert!(alone(&spec.replace("vm.x", "net.ipv4.tcp_syncookies")).starts_with("OutOfcpu"));
}

#[test]
fn critical_pods_make_room() {
    let (node, rules) = (node(), rules());
    let critical = |cpu: &str| {
        pod_from(
            PodSource::File,
            r#"{"uid":"s","name":"s"}"#,
            &format!(r#"{{"containers":[{{"name":"c","resources":{{"requests":{{"cpu":"{cpu}"}}}}}}]}}"#),
        )
    };
    let mut ledger = Ledger::default();
    for (uid, cpu) in [("small", "400m"), ("large", "1200m")] {
        assert_eq!(judge(&mut ledger, &asks(uid, &format!(r#"{{"cpu":"{cpu}"}}"#)), &node, &rules), "ok");
    }
    assert_eq!(judge(&mut ledger.clone(), &critical("400m"), &node, &rules), "ok");
    assert_eq!(judge(&mut ledger.clone(), &critical("700m"), &node, &rules), "preempts [small]");
    assert_eq!(judge(&mut ledger.clone(), &critical("1500m"), &node, &rules), "preempts [large]");
    assert_eq!(judge(&mut ledger.clone(), &critical("2"), &node, &rules), "preempts [large, small]");
    assert_eq!(
        judge(&mut ledger.clone(), &critical("2500m"), &node, &rules),
        "UnexpectedAdmissionError: Unexpected error while attempting to recover from admission failure: preemption: \
         error finding a set of pods to preempt: no set of running pods found to reclaim resources: [(res: cpu, q: 500), ]"
    );
    // What makes room holds none any more.
    let mut after = ledger.clone();
    assert_eq!(judge(&mut after, &critical("1500m"), &node, &rules), "preempts [large]");
    assert!(!after.holds(&PodUid::new("large")) && after.pods() == 2);
    // Until it is certain that the newcomer starts, it can be taken back, but for those that went meanwhile.
    let (mut refused, mut gone) = (after.clone(), after.clone());
    refused.take_back(&PodUid::new("s"));
    assert_eq!(refused, ledger);
    gone.release(&PodUid::new("large"));
    gone.take_back(&PodUid::new("s"));
    assert!(!gone.holds(&PodUid::new("large")) && gone.holds(&PodUid::new("small")));
    after.confirm(&PodUid::new("s"));
    after.take_back(&PodUid::new("s"));
    assert!(!after.holds(&PodUid::new("large")) && !after.holds(&PodUid::new("s")));
    // A third one fills the node: for a slot, the one that asks for nothing goes.
    assert_eq!(judge(&mut ledger, &asks("idle", "{}"), &node, &rules), "ok");
    assert_eq!(judge(&mut ledger, &critical("100m"), &node, &rules), "preempts [idle]");
    // Not for want of a port, or anything else.
    let wrong = pod_from(
        PodSource::File,
        "{}",
        r#"{"nodeName":"other","containers":[{"name":"c","resources":{"requests":{"cpu":"9"}}}]}"#,
    );
    assert!(judge(&mut ledger, &wrong, &node, &rules).starts_with("NodeName"));
}

proptest! {
    /// Whatever comes and goes, the book equals the sum of what it holds, and never more than the node has.
    #[test]
    fn the_book_is_right(steps in prop::collection::vec((0usize..6, 0i64..1500, any::<bool>()), 0..40)) {
        let (node, rules) = (node(), rules());
        let mut ledger = Ledger::default();
        for (who, cpu, leave) in steps {
            let pod = asks(&format!("p{who}"), &format!(r#"{{"cpu":"{cpu}m"}}"#));
            if leave {
                ledger.release(pod.uid());
            } else {
                let before = ledger.clone();
                let admitted = ledger.admit(&pod, &node, &rules).is_ok();
                prop_assert!(admitted || !ledger.holds(pod.uid()));
                prop_assert!(admitted || ledger.pods() <= before.pods());
            }
            let sum: i64 = ledger.pods.values().map(|e| e.requests.get("cpu")).sum();
            prop_assert_eq!(ledger.usage().get("cpu"), sum);
            prop_assert!(sum <= 2000 && ledger.pods() <= 3);
        }
    }
}
