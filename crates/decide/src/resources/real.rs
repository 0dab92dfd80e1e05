//! Random pods with what the reference implementation (1.36.1) makes of them.

use std::collections::BTreeMap;

use model::pod::DesiredPod;
use model::quantity::Quantity;
use serde_json::Value;

use super::testing::{pod, show};
use super::*;

const PODS: &str = include_str!("testdata/pods.json");

fn quantities(value: &Value) -> String {
    let list: BTreeMap<String, model::api::Quantity> = serde_json::from_value(value.clone()).expect("list");
    show(&resource_list(&list))
}

fn each(check: impl Fn(&DesiredPod, &Value)) {
    let cases: Vec<Value> = serde_json::from_str(PODS).expect("pods");
    assert!(cases.len() > 50);
    for case in &cases {
        check(&pod(&case["spec"].to_string()), case);
    }
}

#[test]
fn sums_and_classes() {
    each(|pod, case| {
        assert_eq!(compute_qos_class(pod, true).as_str(), case["qos"], "{case}");
        assert_eq!(show(&pod_requests(pod, PodSum::default())), quantities(&case["requests"]), "{case}");
        assert_eq!(show(&pod_limits(pod, PodSum::default())), quantities(&case["limits"]), "{case}");
    });
}

#[test]
fn oom_scores() {
    each(|pod, case| {
        for (name, want) in case["oom"].as_object().expect("scores") {
            let container = pod.container(name).expect("container");
            assert_eq!(Some(oom_score_adj(pod, container, 8 << 30, true)), want.as_i64(), "{name} of {case}");
        }
    });
}

#[test]
fn cgroups() {
    each(|pod, case| {
        let qos = MemoryQos { throttling_factor: 0.9, tiered_reservation: true, page_size: 4096 };
        let options = PodCgroupOptions { memory_qos: Some(qos), ..PodCgroupOptions::default() };
        let got = pod_cgroup_resources(pod, &options);
        assert_eq!(got.cpu_shares, case["shares"].as_u64(), "{case}");
        assert_eq!(got.cpu_quota, case["quota"].as_i64(), "{case}");
        assert_eq!(got.memory_limit, case["memory"].as_i64(), "{case}");
        let unified: BTreeMap<String, String> = serde_json::from_value(case["unified"].clone()).unwrap_or_default();
        assert_eq!(got.unified, unified, "{case}");
        let pages = got.hugepage_limits.get("2MB").copied().unwrap_or(0);
        let request = pod_requests(pod, PodSum::default()).get("hugepages-2Mi").map_or(0, Quantity::value);
        assert_eq!(pages as i64, request, "{case}");
    });
}
