//! Which devices a container gets.

use super::{Devices, Ids};
use crate::numa::NumaMask;

/// What a container wants of one resource.
#[derive(Clone, Copy, Debug)]
pub struct Want<'a> {
    /// UID of its pod.
    pub pod: &'a str,
    /// Its name.
    pub container: &'a str,
    /// The resource.
    pub resource: &'a str,
    /// How many devices, from its limits.
    pub needed: usize,
    /// Devices that init containers of the pod had, and nobody has any more when this one runs.
    pub reusable: &'a Ids,
    /// NUMA nodes that the topology manager chose; None: any.
    pub affinity: Option<NumaMask>,
    /// The container's pod ran before this agent started.
    pub running: bool,
}

/// What is to be done for a [`Want`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    /// Nothing: it has what it needs.
    Nothing,
    /// These devices, at least one.
    Take(Ids),
    /// The plugin is to be asked first which of them it prefers (GetPreferredAllocation).
    Ask {
        /// Those to choose from.
        available: Ids,
        /// Those of them that must be among the chosen.
        must_include: Ids,
        /// How many.
        size: usize,
    },
}

/// Devices that are taken one after the other until there are enough.
struct Taken {
    ids: Ids,
    needed: usize,
}

impl Taken {
    /// Takes from these; true when there are enough.
    fn from(&mut self, ids: &Ids) -> bool {
        for id in ids {
            if self.ids.len() == self.needed {
                break;
            }
            self.ids.insert(id.clone());
        }
        self.ids.len() == self.needed
    }
}

impl Devices {
    /// Chooses devices. `preferred` is the plugin's answer to an earlier [`Choice::Ask`]; what is free may have changed since.
    ///
    /// # Errors
    /// Why there are none, in Go's words (they become the message of the pod's rejection).
    pub fn choose(&self, want: &Want<'_>, preferred: Option<&Ids>) -> Result<Choice, String> {
        let Want { pod, container, resource, needed, .. } = *want;
        let held = self.pods.get(pod).is_some_and(|p| !p.ended);
        let has = self.allocation(pod, container, resource).filter(|_| held).map(super::Allocation::ids);
        if let Some(has) = &has
            && has.len() != needed
        {
            return Err(format!(
                "pod \"{pod}\" container \"{container}\" changed request for resource \"{resource}\" from {} to {needed}",
                has.len()
            ));
        }
        if want.running {
            return Ok(Choice::Nothing);
        }
        let known =
            self.resources.get(resource).ok_or_else(|| format!("cannot allocate unregistered device {resource}"))?;
        let healthy = known.healthy();
        if healthy.is_empty() {
            return Err(format!("no healthy devices present; cannot allocate unhealthy devices {resource}"));
        }
        if has.as_ref().is_some_and(|has| !has.is_subset(&healthy)) {
            return Err(format!(
                "previously allocated devices are no longer healthy; cannot allocate unhealthy devices {resource}"
            ));
        }
        if has.is_some() || needed == 0 {
            return Ok(Choice::Nothing);
        }
        let mut taken = Taken { ids: Ids::new(), needed };
        // What an init container had may have broken since.
        if taken.from(&want.reusable.intersection(&healthy).cloned().collect()) {
            return Ok(Choice::Take(taken.ids));
        }
        let in_use = self.in_use(resource);
        let free: Ids = healthy.difference(&in_use).cloned().collect();
        let missing = needed - taken.ids.len();
        if free.len() < missing {
            return Err(format!(
                "requested number of devices unavailable for {resource}. Requested: {missing}, Available: {}",
                free.len()
            ));
        }
        let asks = preferred.is_none() && known.options.preferred;
        let (aligned, rest) = self.by_affinity(resource, &free, want.affinity);
        let from = if missing < aligned.len() {
            &aligned
        } else {
            // All that is aligned, to keep what the topology manager promised; the plugin chooses among the rest.
            if taken.from(&aligned) {
                return Ok(Choice::Take(taken.ids));
            }
            &free
        };
        if asks {
            return Ok(Choice::Ask {
                available: from.union(&taken.ids).cloned().collect(),
                must_include: taken.ids,
                size: needed,
            });
        }
        let preferred: Ids = preferred.map(|p| p.intersection(from).cloned().collect()).unwrap_or_default();
        let mut sources = [&preferred, &aligned].into_iter().chain(&rest);
        if sources.any(|ids| taken.from(ids)) {
            return Ok(Choice::Take(taken.ids));
        }
        Err(format!(
            "unexpectedly allocated less resources than required. Requested: {needed}, Got: {}",
            taken.ids.len()
        ))
    }

    /// Splits free devices: those on the chosen nodes; then those on others, and those that belong to none. Within the chosen nodes the ones with
    /// the fewest devices count first.
    fn by_affinity(&self, resource: &str, free: &Ids, affinity: Option<NumaMask>) -> (Ids, [Ids; 2]) {
        let known = self.resources.get(resource);
        let (Some(known), Some(mask)) = (known.filter(|r| r.has_topology()), affinity) else {
            return (Ids::new(), [Ids::new(), free.clone()]);
        };
        let nodes = |id: &String| known.devices.get(id).map_or(&[][..], |d| &d.nodes);
        let (placed, nowhere): (Ids, Ids) = free.iter().cloned().partition(|id| !nodes(id).is_empty());
        let (aligned, elsewhere) = placed.into_iter().partition(|id| mask.has_any(nodes(id)));
        (aligned, [elsewhere, nowhere])
    }
}
