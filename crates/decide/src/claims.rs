//! Resource claims of pods (dynamic resource allocation, KEP-4381): which there are, who uses them, what their drivers made of them.
//!
//! ```text
//!   claimed by a pod ──▶ to prepare ──drivers──▶ prepared ──last pod gone──▶ to take back ──drivers──▶ forgotten
//! ```
//!
//! A claim is written down before its drivers are asked, so that none is ever prepared and not known.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1::ResourceClaim;
use model::pod::{ContainerEntry, DesiredPod};

/// A device as its driver describes it (DRA gRPC `Device`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimedDevice {
    /// Pool.
    pub pool: String,
    /// Its name in the pool.
    pub name: String,
    /// Share of a device that several claims use.
    pub share: Option<String>,
    /// Requests of the claim that it is for; none: all.
    pub requests: Vec<String>,
    /// Qualified CDI names.
    pub cdi: Vec<String>,
}

/// A claim that pods of this node use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    /// UID.
    pub uid: String,
    /// Name.
    pub name: String,
    /// Namespace.
    pub namespace: String,
    /// UIDs of the pods.
    pub pods: BTreeSet<String>,
    /// By driver, also those that have not answered yet.
    pub drivers: BTreeMap<String, Vec<ClaimedDevice>>,
    /// Every driver has answered since this agent started. One that was prepared by an earlier agent is prepared again, which drivers must bear.
    pub prepared: bool,
}

impl Claim {
    /// A claim of the API that is allocated.
    ///
    /// # Errors
    /// It is not, in Go's words.
    pub fn of(object: &ResourceClaim) -> Result<Self, String> {
        let meta = &object.metadata;
        let name = meta.name.clone().unwrap_or_default();
        let allocation = object.status.as_ref().and_then(|s| s.allocation.as_ref());
        let allocation = allocation.ok_or_else(|| format!("ResourceClaim {name}: not allocated"))?;
        let results = allocation.devices.iter().flat_map(|d| d.results.iter().flatten());
        Ok(Self {
            uid: meta.uid.clone().unwrap_or_default(),
            namespace: meta.namespace.clone().unwrap_or_default(),
            drivers: results.map(|r| (r.driver.clone(), Vec::new())).collect(),
            name,
            ..Self::default()
        })
    }
}

/// A claim that a pod names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    /// Name of the object.
    pub object: String,
    /// It was made for this pod from a template, so that the pod must be its owner.
    pub owned: bool,
}

/// The objects behind a pod's claims: those that it names, and the one for its extended resources. What has no object needs none.
///
/// # Errors
/// One is not made yet, in Go's words.
pub fn of_pod(pod: &DesiredPod) -> Result<Vec<Named>, String> {
    let mut all = Vec::new();
    for claim in pod.spec().resource_claims.iter().flatten() {
        all.extend(object_of(pod, &claim.name)?);
    }
    all.extend(extended(pod).map(|object| Named { object: object.to_owned(), owned: false }));
    Ok(all)
}

/// The claim for extended resources (KEP-5004).
fn extended(pod: &DesiredPod) -> Option<&str> {
    Some(pod.stored_status()?.extended_resource_claim_status.as_ref()?.resource_claim_name.as_str())
}

/// The object behind one name in `spec.resourceClaims`; None: it needs none.
///
/// # Errors
/// It is not made yet, in Go's words.
pub fn object_of(pod: &DesiredPod, name: &str) -> Result<Option<Named>, String> {
    let Some(claim) = pod.spec().resource_claims.iter().flatten().find(|c| c.name == name) else { return Ok(None) };
    if let Some(object) = &claim.resource_claim_name {
        return Ok(Some(Named { object: object.clone(), owned: false }));
    }
    let made = pod.stored_status().and_then(|s| s.resource_claim_statuses.as_ref());
    match made.into_iter().flatten().find(|s| s.name == name) {
        Some(status) => Ok(status.resource_claim_name.clone().map(|object| Named { object, owned: true })),
        None => Err(format!("pod \"{}/{}\": ResourceClaim not created yet", pod.namespace(), pod.name())),
    }
}

/// Whether the pod may use a claim.
///
/// # Errors
/// It may not, in Go's words.
pub fn check(pod: &DesiredPod, named: &Named, object: &ResourceClaim) -> Result<(), String> {
    let uid = pod.uid().as_str();
    let owners = object.metadata.owner_references.iter().flatten();
    if named.owned && !owners.into_iter().any(|o| o.controller == Some(true) && o.uid == uid) {
        return Err(format!(
            "ResourceClaim {}/{} was not created for pod {}/{} (pod is not owner)",
            object.metadata.namespace.as_deref().unwrap_or_default(),
            named.object,
            pod.namespace(),
            pod.name()
        ));
    }
    let reserved = object.status.iter().flat_map(|s| s.reserved_for.iter().flatten());
    if !reserved.into_iter().any(|r| r.uid == uid) {
        return Err(format!(
            "pod {} ({uid}) is not allowed to use ResourceClaim {} ({})",
            pod.name(),
            named.object,
            object.metadata.uid.as_deref().unwrap_or_default()
        ));
    }
    Ok(())
}

/// The book of claims.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Claims {
    /// By namespace and name.
    claims: BTreeMap<(String, String), Claim>,
}

impl Claims {
    /// Takes over what an earlier agent wrote down.
    pub fn restore(claims: impl IntoIterator<Item = Claim>) -> Self {
        Self { claims: claims.into_iter().map(|c| ((c.namespace.clone(), c.name.clone()), c)).collect() }
    }

    /// Every claim.
    pub fn all(&self) -> impl Iterator<Item = &Claim> {
        self.claims.values()
    }

    /// One claim.
    pub fn get(&self, namespace: &str, name: &str) -> Option<&Claim> {
        self.claims.get(&(namespace.to_owned(), name.to_owned()))
    }

    /// A pod uses this claim. True when its drivers are to prepare it.
    ///
    /// # Errors
    /// Another claim of that name is still here, in Go's words.
    pub fn claim(&mut self, pod: &str, new: &Claim) -> Result<bool, String> {
        let known = self.claims.entry((new.namespace.clone(), new.name.clone())).or_insert_with(|| new.clone());
        if known.uid != new.uid {
            return Err(format!(
                "old ResourceClaim with same name {} and different UID {} still exists (previous pod force-deleted?!)",
                new.name, known.uid
            ));
        }
        known.pods.insert(pod.to_owned());
        Ok(!known.prepared)
    }

    /// A driver has prepared a claim.
    pub fn answered(&mut self, claim: &Claim, driver: &str, devices: Vec<ClaimedDevice>) {
        if let Some(known) = self.claims.get_mut(&(claim.namespace.clone(), claim.name.clone())) {
            known.drivers.insert(driver.to_owned(), devices);
        }
    }

    /// Every driver has.
    pub fn prepared(&mut self, claim: &Claim) {
        if let Some(known) = self.claims.get_mut(&(claim.namespace.clone(), claim.name.clone())) {
            known.prepared = true;
        }
    }

    /// A pod needs its claims no more: gives those that nobody else uses, for their drivers to take back. The others forget the pod.
    pub fn leave(&mut self, pod: &str) -> Vec<Claim> {
        let mut last = Vec::new();
        for claim in self.claims.values_mut().filter(|c| c.pods.contains(pod)) {
            if claim.pods.len() > 1 {
                claim.pods.remove(pod);
            } else {
                // Prepared anew, should the pod come back before it is taken back.
                claim.prepared = false;
                last.push(claim.clone());
            }
        }
        last
    }

    /// The drivers have taken back a claim.
    pub fn forget(&mut self, claim: &Claim) {
        self.claims.remove(&(claim.namespace.clone(), claim.name.clone()));
    }

    /// True when the pod has claims here.
    pub fn holds_any(&self, pod: &str) -> bool {
        self.claims.values().any(|c| c.pods.contains(pod))
    }

    /// UIDs of pods with claims.
    pub fn pods(&self) -> BTreeSet<String> {
        self.claims.values().flat_map(|c| c.pods.iter().cloned()).collect()
    }

    /// Claims that a container uses, each with the requests of it (none: all).
    ///
    /// # Errors
    /// One is not made yet.
    pub fn uses(pod: &DesiredPod, container: &ContainerEntry<'_>) -> Result<BTreeMap<String, Vec<String>>, String> {
        let mut uses: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let named = container.spec.resources.iter().flat_map(|r| r.claims.iter().flatten());
        for claim in named {
            if let Some(named) = object_of(pod, &claim.name)? {
                uses.entry(named.object).or_default().push(claim.request.clone().unwrap_or_default());
            }
        }
        let status = pod.stored_status().and_then(|s| s.extended_resource_claim_status.as_ref());
        for mapping in status.iter().flat_map(|s| &s.request_mappings) {
            let asks = |r: &model::api::ResourceRequirements| {
                r.requests.as_ref().is_some_and(|r| r.contains_key(&mapping.resource_name))
            };
            if mapping.container_name == container.spec.name && container.spec.resources.as_ref().is_some_and(asks) {
                let object = extended(pod).unwrap_or_default().to_owned();
                uses.entry(object).or_default().push(mapping.request_name.clone());
            }
        }
        Ok(uses)
    }

    /// CDI names of a container's devices.
    ///
    /// # Errors
    /// One of its claims is not prepared, in Go's words.
    pub fn cdi(&self, pod: &DesiredPod, container: &ContainerEntry<'_>) -> Result<Vec<String>, String> {
        let mut names = Vec::new();
        for (object, requests) in Self::uses(pod, container)? {
            let claim = self.get(pod.namespace(), &object).ok_or_else(|| {
                format!(
                    "internal error: unable to get claim info for ResourceClaim {object} in namespace {}",
                    pod.namespace()
                )
            })?;
            for device in requests.iter().flat_map(|r| claim.drivers.values().flatten().filter(|d| is_for(d, r))) {
                names.extend(device.cdi.iter().filter(|n| !names.contains(*n)).cloned().collect::<Vec<_>>());
            }
        }
        Ok(names)
    }
}

/// A device is for a request when its driver says so, or says nothing. A request with a subrequest (`a/b`) is meant by its first part.
pub fn is_for(device: &ClaimedDevice, request: &str) -> bool {
    let base = request.split('/').next().unwrap_or_default();
    request.is_empty() || device.requests.is_empty() || device.requests.iter().any(|r| r == request || r == base)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use model::pod::PodSource;

    fn object(owner: &str, reserved: &str, allocated: bool) -> ResourceClaim {
        let mut object = json!({
            "metadata": {"name": "x", "namespace": "ns", "uid": "cu", "ownerReferences": [
                {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": owner, "controller": true}]},
            "spec": {},
            "status": {"reservedFor": [{"resource": "pods", "name": "p", "uid": reserved}]},
        });
        if allocated {
            object["status"]["allocation"] = json!({"devices": {"results": [
                {"driver": "a.example.com", "pool": "n", "device": "d", "request": "r"},
                {"driver": "b.example.com", "pool": "n", "device": "e", "request": "s"}]}});
        }
        serde_json::from_value(object).expect("claim")
    }

    fn pod_with(spec: serde_json::Value) -> DesiredPod {
        let object = json!({
            "metadata": {"name": "web", "namespace": "ns", "uid": "uid-1"},
            "spec": spec,
            "status": {"resourceClaimStatuses": [{"name": "made", "resourceClaimName": "x"}, {"name": "none"}]},
        });
        DesiredPod::new(serde_json::from_value(object).expect("pod"), PodSource::Api).expect("pod")
    }

    fn pod() -> DesiredPod {
        let used = json!([{"name": "made", "request": "r"}, {"name": "given"}, {"name": "none"}]);
        pod_with(json!({
            "resourceClaims": [
                {"name": "given", "resourceClaimName": "y"},
                {"name": "made", "resourceClaimTemplateName": "t"},
                {"name": "none", "resourceClaimTemplateName": "t"},
            ],
            "containers": [{"name": "c", "resources": {"claims": used}}],
        }))
    }

    #[test]
    fn names() {
        let found = of_pod(&pod()).expect("names");
        let named = |object: &str, owned| Named { object: object.into(), owned };
        assert_eq!(found, [named("y", false), named("x", true)]);
        let early = pod_with(json!({
            "resourceClaims": [{"name": "early", "resourceClaimTemplateName": "t"}],
            "containers": [{"name": "c"}],
        }));
        assert!(of_pod(&early).unwrap_err().ends_with("ResourceClaim not created yet"));
    }

    #[test]
    fn who_may() {
        let pod = pod();
        let uid = pod.uid().as_str().to_owned();
        let named = Named { object: "x".into(), owned: true };
        assert_eq!(check(&pod, &named, &object(&uid, &uid, true)), Ok(()));
        assert!(check(&pod, &named, &object("other", &uid, true)).unwrap_err().ends_with("(pod is not owner)"));
        assert!(
            check(&pod, &named, &object(&uid, "other", true))
                .unwrap_err()
                .contains("is not allowed to use ResourceClaim x (cu)")
        );
        assert_eq!(Claim::of(&object(&uid, &uid, false)).unwrap_err(), "ResourceClaim x: not allocated");
        let claim = Claim::of(&object(&uid, &uid, true)).expect("claim");
        assert_eq!(claim.drivers.keys().collect::<Vec<_>>(), ["a.example.com", "b.example.com"]);
    }

    #[test]
    fn a_claim_is_kept_until_its_last_pod_goes() {
        let claim = Claim::of(&object("", "", true)).expect("claim");
        let mut claims = Claims::default();
        assert_eq!(claims.claim("p", &claim), Ok(true));
        assert_eq!(claims.claim("q", &claim), Ok(true), "nobody has prepared it yet");
        let device =
            ClaimedDevice { requests: vec!["r".into()], cdi: vec!["v/c=1".into()], ..ClaimedDevice::default() };
        claims.answered(&claim, "a.example.com", vec![device]);
        claims.prepared(&claim);
        assert_eq!(claims.claim("p", &claim), Ok(false));
        let newer = Claim { uid: "other".into(), ..claim.clone() };
        assert!(
            claims
                .claim("p", &newer)
                .unwrap_err()
                .starts_with("old ResourceClaim with same name x and different UID cu")
        );
        assert!(claims.leave("p").is_empty() && !claims.holds_any("p") && claims.holds_any("q"));
        let last = claims.leave("q");
        assert_eq!((last.len(), last[0].name.as_str()), (1, "x"));
        // Not taken back yet: asked again, it comes again.
        assert_eq!(claims.leave("q").len(), 1);
        claims.forget(&last[0]);
        assert_eq!(claims, Claims::default());
    }

    #[test]
    fn what_a_container_gets() {
        let pod = pod();
        let uid = pod.uid().as_str().to_owned();
        let container = pod.container("c").expect("container");
        let mut claims = Claims::default();
        assert!(
            claims
                .cdi(&pod, &container)
                .unwrap_err()
                .starts_with("internal error: unable to get claim info for ResourceClaim x")
        );
        let claim = Claim::of(&object(&uid, &uid, true)).expect("claim");
        let other = Claim { uid: "yu".into(), name: "y".into(), ..claim.clone() };
        for one in [&claim, &other] {
            claims.claim(&uid, one).expect("claimed");
        }
        let device = |request: &str, cdi: &str| ClaimedDevice {
            requests: vec![request.into()],
            cdi: vec![cdi.into()],
            ..ClaimedDevice::default()
        };
        claims.answered(&claim, "a.example.com", vec![device("r", "v/c=1"), device("s", "v/c=2")]);
        claims.answered(&other, "b.example.com", vec![device("s", "v/c=3")]);
        assert_eq!(claims.cdi(&pod, &container).expect("names"), ["v/c=1", "v/c=3"]);
    }

    #[test]
    fn requests() {
        let device = |requests: &[&str]| ClaimedDevice {
            requests: requests.iter().map(ToString::to_string).collect(),
            ..ClaimedDevice::default()
        };
        for (device, request, wanted) in [
            (device(&["r"]), "r", true),
            (device(&["r"]), "r/sub", true),
            (device(&["r"]), "s", false),
            (device(&[]), "s", true),
            (device(&["r"]), "", true),
        ] {
            assert_eq!(is_for(&device, request), wanted, "{device:?} {request}");
        }
    }
}
