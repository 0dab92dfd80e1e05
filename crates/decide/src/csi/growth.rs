//! A volume that grows while it is used: whether the node has a part in it, and what the claim's status says of that (KEP-1790).

use jiff::Timestamp;
use model::api::{PersistentVolume, PersistentVolumeClaim};
use model::quantity::Quantity;
use serde_json::{Value, json};

/// States of a claim's resize in which the node is to do its part.
const FOR_THE_NODE: [&str; 2] = ["NodeResizePending", "NodeResizeInProgress"];
/// The controller has done all of it.
const NOT_HERE: &str = "volume.kubernetes.io/node-expansion-not-required";

/// A claim whose volume may have to grow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Growth {
    /// Name of the claim, in the pod's namespace.
    pub claim: String,
    /// UID of the claim, for events about it.
    pub claim_uid: String,
    /// Bytes that it is to have: what is allocated for the claim, or the capacity of the PersistentVolume.
    pub wanted: i64,
    /// The same as it stands there.
    pub text: String,
    /// The claim's status names the states of its resize.
    pub has_states: bool,
    /// The claim's status has that size already: another node has done its part, and this one may have to.
    pub told: bool,
}

/// How a resize goes on the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResizeNews {
    /// The driver is asked.
    Begun,
    /// It refused; it is asked again.
    Failed(String),
    /// It can never be done so: the controller is to find another way.
    Infeasible(String),
    /// It is done.
    Done,
}

/// The claim's part in a resize, when the node has one.
pub(super) fn growth(bound: &PersistentVolume, claim: &PersistentVolumeClaim) -> Option<Growth> {
    let spec = bound.spec.as_ref()?;
    let status = claim.status.as_ref()?;
    let bytes = |quantity| Quantity::of(quantity).ok().map(|q| q.value());
    let old = bytes(status.capacity.as_ref()?.get("storage")?)?;
    let state = status.allocated_resource_statuses.as_ref().and_then(|s| s.get("storage"));
    let allocated = status.allocated_resources.as_ref().and_then(|a| a.get("storage"));
    let capacity = spec.capacity.as_ref()?.get("storage")?;
    let wanted = allocated.filter(|_| state.is_some()).unwrap_or(capacity);
    let size = bytes(wanted)?;
    let annotations = claim.metadata.annotations.as_ref();
    let everywhere = spec.access_modes.iter().flatten().any(|m| m == "ReadWriteMany")
        && annotations.is_none_or(|a| !a.contains_key(NOT_HERE));
    let told = size <= old && state.is_none() && everywhere;
    // A controller that names states names one for the node's part; an older one says nothing.
    let ours = match state {
        Some(state) => FOR_THE_NODE.contains(&state.as_str()),
        None => size > old && allocated.is_none(),
    };
    (ours || told).then(|| Growth {
        claim: claim.metadata.name.clone().unwrap_or_default(),
        claim_uid: claim.metadata.uid.clone().unwrap_or_default(),
        wanted: size,
        text: wanted.0.clone(),
        has_states: state.is_some(),
        told,
    })
}

impl Growth {
    /// The strategic merge patch of the claim's status; None: nothing is to be told.
    pub fn patch(&self, news: &ResizeNews, now: Timestamp) -> Option<Value> {
        if self.told {
            return None;
        }
        let now = Timestamp::from_second(now.as_second()).unwrap_or(now).to_string();
        let error = |message: &str| {
            json!([{"type": "NodeResizeError", "status": "True", "lastTransitionTime": now,
                "message": format!("failed to expand pvc with {message}")}])
        };
        let over = |kind: &str| json!({"$patch": "delete", "type": kind});
        let status = match news {
            ResizeNews::Begun if !self.has_states => return None,
            ResizeNews::Begun => json!({"allocatedResourceStatuses": {"storage": "NodeResizeInProgress"}}),
            ResizeNews::Failed(_) | ResizeNews::Infeasible(_) if !self.has_states => return None,
            ResizeNews::Failed(message) => json!({"conditions": error(message)}),
            ResizeNews::Infeasible(message) => json!({
                "allocatedResourceStatuses": {"storage": "NodeResizeInfeasible"}, "conditions": error(message)}),
            ResizeNews::Done => json!({
                "capacity": {"storage": self.text},
                "allocatedResourceStatuses": {"storage": null},
                "conditions": [over("FileSystemResizePending"), over("Resizing"), over("NodeResizeError")],
            }),
        };
        Some(json!({"metadata": {"uid": self.claim_uid}, "status": status}))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(spec: &str, claim: &str) -> Option<Growth> {
        let bound = serde_json::from_str(&format!(r#"{{"spec":{{"capacity":{{"storage":"2Gi"}}{spec}}}}}"#)).unwrap();
        growth(&bound, &serde_json::from_str(claim).unwrap())
    }

    #[test]
    fn the_node_has_a_part_in_the_growth() {
        let many = r#","accessModes":["ReadWriteMany"]"#;
        for (spec, status, want) in [
            ("", r#"{"capacity":{"storage":"1Gi"}}"#, Some((2 << 30, false))),
            ("", r#"{"capacity":{"storage":"2Gi"}}"#, None),
            ("", r#"{"capacity":{"storage":"1Gi"},"allocatedResources":{"storage":"2Gi"}}"#, None),
            (
                "",
                r#"{"capacity":{"storage":"1Gi"},"allocatedResourceStatuses":{"storage":"NodeResizePending"}}"#,
                Some((2 << 30, false)),
            ),
            (
                "",
                r#"{"capacity":{"storage":"1Gi"},"allocatedResources":{"storage":"3Gi"},"allocatedResourceStatuses":{"storage":"NodeResizeInProgress"}}"#,
                Some((3 << 30, false)),
            ),
            (
                "",
                r#"{"capacity":{"storage":"1Gi"},"allocatedResourceStatuses":{"storage":"NodeResizeInfeasible"}}"#,
                None,
            ),
            (
                "",
                r#"{"capacity":{"storage":"1Gi"},"allocatedResourceStatuses":{"storage":"ControllerResizeInProgress"}}"#,
                None,
            ),
            (many, r#"{"capacity":{"storage":"2Gi"}}"#, Some((2 << 30, true))),
            (many, r#"{"capacity":{"storage":"1Gi"}}"#, Some((2 << 30, false))),
        ] {
            let got = of(spec, &format!(r#"{{"metadata":{{"name":"c"}},"status":{status}}}"#));
            assert_eq!(got.map(|g| (g.wanted, g.told)), want, "{spec} {status}");
        }
        let here = r#"{"metadata":{"annotations":{"volume.kubernetes.io/node-expansion-not-required":"true"}},"status":{"capacity":{"storage":"2Gi"}}}"#;
        assert_eq!(of(many, here), None);
        assert_eq!(of("", "{}"), None, "the claim says nothing of its size");
    }

    #[test]
    fn what_the_claim_is_told() {
        let pending = r#"{"metadata":{"name":"c","uid":"u"},"status":{"capacity":{"storage":"1Gi"},"allocatedResourceStatuses":{"storage":"NodeResizePending"}}}"#;
        let states = of("", pending).unwrap();
        let old = Growth { has_states: false, ..states.clone() };
        let now: Timestamp = "2026-01-02T03:04:05.6Z".parse().unwrap();
        let status = |growth: &Growth, news| growth.patch(&news, now).map(|p| p["status"].clone());
        let failed = || ResizeNews::Failed("rpc error".into());
        assert_eq!(
            status(&states, ResizeNews::Begun),
            Some(json!({"allocatedResourceStatuses": {"storage": "NodeResizeInProgress"}}))
        );
        let condition = json!([{"type": "NodeResizeError", "status": "True", "lastTransitionTime": "2026-01-02T03:04:05Z",
            "message": "failed to expand pvc with rpc error"}]);
        assert_eq!(status(&states, failed()), Some(json!({"conditions": condition})));
        assert_eq!(
            status(&states, ResizeNews::Infeasible("rpc error".into())),
            Some(json!({"allocatedResourceStatuses": {"storage": "NodeResizeInfeasible"}, "conditions": condition}))
        );
        for growth in [&states, &old] {
            let done = growth.patch(&ResizeNews::Done, now).unwrap();
            assert_eq!(
                (&done["metadata"]["uid"], &done["status"]["capacity"]["storage"]),
                (&json!("u"), &json!("2Gi"))
            );
        }
        assert_eq!((status(&old, ResizeNews::Begun), status(&old, failed())), (None, None), "older controllers");
        assert_eq!(status(&Growth { told: true, ..states }, ResizeNews::Done), None);
    }
}
