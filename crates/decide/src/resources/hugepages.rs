//! Huge page sizes, as resources (`hugepages-2Mi`) and as cgroup files spell them (`2MB`).

use model::pod::DesiredPod;
use model::quantity::Quantity;

use super::{ResourceList, aggregate::pod_level_requests, container_requests};

/// Prefix of the resource names.
pub const PREFIX: &str = "hugepages-";

/// `hugepages-SIZE`.
pub fn is_resource(name: &str) -> bool {
    name.starts_with(PREFIX)
}

/// Page size in bytes of a resource name.
pub fn page_size(resource: &str) -> Option<i64> {
    Some(Quantity::parse(resource.strip_prefix(PREFIX)?).ok()?.value())
}

/// A page size as cgroup files spell it: `64KB`, `2MB`, `1GB`. None when no unit divides it.
pub fn kernel_size(mut bytes: i64) -> Option<String> {
    const UNITS: [&str; 6] = ["B", "KB", "MB", "GB", "TB", "PB"];
    let mut unit = 0;
    while bytes % 1024 == 0 && unit < UNITS.len() - 1 && bytes != 0 {
        bytes /= 1024;
        unit += 1;
    }
    (bytes <= 1024 || unit == UNITS.len() - 1).then(|| format!("{bytes}{}", UNITS[unit]))
}

/// A directory below `/sys/kernel/mm/hugepages` (`hugepages-2048kB`) in that spelling.
pub fn size_of_directory(name: &str) -> Option<String> {
    let kib: i64 = name.strip_prefix(PREFIX)?.strip_suffix("kB")?.parse().ok()?;
    kernel_size(kib.checked_mul(1024)?)
}

/// Bytes by spelled page size of every huge page resource in a list.
pub(crate) fn amounts(list: &ResourceList) -> impl Iterator<Item = (String, u64)> {
    list.iter().filter_map(|(name, amount)| {
        let size = kernel_size(page_size(name)?)?;
        Some((size, u64::try_from(amount.value()).unwrap_or(0)))
    })
}

/// Page size of an emptyDir of medium `HugePages` or `HugePages-SIZE`, in the text of the mount option `pagesize`: the one size that the
/// pod requests, or the size named if the pod requests it. `pod_level`: gate PodLevelResources.
///
/// # Errors
/// The pod requests none, or several and the medium names none.
pub fn page_size_of_medium(pod: &DesiredPod, medium: &str, pod_level: bool) -> Result<String, String> {
    let invalid = |name: &str| format!("invalid huge page size in \"{name}\"");
    let wanted = match medium.strip_prefix("HugePages-") {
        Some(size) => Some(Quantity::parse(size).map_err(|_| invalid(medium))?),
        None if medium == "HugePages" => None,
        None => return Err(format!("medium: {medium} is not a hugepage medium")),
    };
    let mut lists = Vec::new();
    if pod_level {
        lists.push(pod_level_requests(pod));
    }
    lists.extend(pod.app_containers().chain(pod.init_containers()).map(container_requests));
    let mut found: Option<Quantity> = None;
    for name in lists.iter().flat_map(ResourceList::keys) {
        let Some(size) = name.strip_prefix(PREFIX) else { continue };
        let size = Quantity::parse(size).map_err(|_| invalid(name))?;
        match (&wanted, &found) {
            (Some(wanted), _) if *wanted != size => {}
            (None, Some(other)) if *other != size => {
                return Err(format!("medium: {medium} can't be used if container requests multiple huge page sizes"));
            }
            _ => found = Some(size),
        }
    }
    found.map(|size| size.to_string()).ok_or_else(|| {
        format!("medium {medium}: hugePages storage requested, but there is no resource request for huge pages")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resources::testing::pod;

    #[test]
    fn medium() {
        let requests = |names: &[&str]| {
            let list: Vec<_> = names.iter().map(|n| format!(r#""{n}": "4Gi""#)).collect();
            pod(&format!(
                r#"{{"containers": [{{"name": "a", "resources": {{"requests": {{{}}}}}}}]}}"#,
                list.join(", ")
            ))
        };
        let two = requests(&["cpu", "hugepages-2Mi"]);
        let both = requests(&["hugepages-2Mi", "hugepages-1Gi"]);
        let none = "hugePages storage requested, but there is no resource request for huge pages";
        for (pod, medium, want) in [
            (&two, "HugePages", Ok("2Mi".to_string())),
            (&two, "HugePages-2Mi", Ok("2Mi".into())),
            (&two, "HugePages-1Gi", Err(format!("medium HugePages-1Gi: {none}"))),
            (&requests(&["cpu"]), "HugePages", Err(format!("medium HugePages: {none}"))),
            (&both, "HugePages-1Gi", Ok("1Gi".into())),
            (
                &both,
                "HugePages",
                Err("medium: HugePages can't be used if container requests multiple huge page sizes".into()),
            ),
            (&two, "Memory", Err("medium: Memory is not a hugepage medium".into())),
        ] {
            assert_eq!(page_size_of_medium(pod, medium, true), want, "{medium}");
        }
        let level = pod(r#"{"resources": {"requests": {"hugepages-2Mi": "4Mi"}}, "containers": [{"name": "a"}]}"#);
        assert_eq!(page_size_of_medium(&level, "HugePages", true).as_deref(), Ok("2Mi"));
        assert!(page_size_of_medium(&level, "HugePages", false).is_err());
    }

    #[test]
    fn spellings() {
        for (resource, want) in [
            ("hugepages-2Mi", Some("2MB")),
            ("hugepages-1Gi", Some("1GB")),
            ("hugepages-64Ki", Some("64KB")),
            ("hugepages-2M", None),
            ("hugepages-", None),
            ("memory", None),
        ] {
            assert_eq!(page_size(resource).and_then(kernel_size).as_deref(), want, "{resource}");
        }
        assert_eq!(size_of_directory("hugepages-1048576kB").as_deref(), Some("1GB"));
        assert_eq!(size_of_directory("hugepages-2048"), None);
        assert_eq!(kernel_size(512).as_deref(), Some("512B"));
    }
}
