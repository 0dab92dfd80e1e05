//! Resources that change while the pod runs: containers that are updated, those that are restarted for it, and the pod's cgroup.

use model::observed::ObservedContainer;
use model::plan::{KillReason, Resize, SandboxStep, Update};
use model::pod::{ContainerEntry, ContainerKind, DesiredPod};

use super::{Has, Round};
use crate::resize::{policy, resizable, sizes, spec_sizes};
use crate::resources::{CPU, MEMORY};

impl<'a> Round<'a> {
    /// Plans what a running container needs to get the resources that the pod was given; true when it is restarted for them.
    pub(super) fn resize_container(&mut self, entry: &ContainerEntry<'_>, c: &'a ObservedContainer) -> bool {
        let Some(input) = self.input.has.filter(|h| resizable(entry.kind, h.rules.init_containers)) else {
            return false;
        };
        // Without a record nothing is known to have changed.
        let Some(has) = input.actuated.containers.get(&entry.spec.name) else { return false };
        let (from, to) = (sizes(None, has), spec_sizes(self.input.pod, entry));
        if from == to {
            return false;
        }
        let memory = (from.memory_request, from.memory_limit) != (to.memory_request, to.memory_limit);
        let cpu = (from.cpu_request, from.cpu_limit) != (to.cpu_request, to.cpu_limit);
        let restart = (memory && policy(entry.spec, MEMORY)) || (cpu && policy(entry.spec, CPU));
        if restart && entry.kind != ContainerKind::Init {
            let message = format!("Container {} resize requires restart", entry.spec.name);
            self.kill(c, KillReason::Resize, message, None);
            return true;
        }
        let update = Update { id: c.id.clone(), name: entry.spec.name.clone(), from, to };
        let resize = self.plan.resize.get_or_insert_default();
        // What gives up comes before what takes, so that the pod's limit holds all the time. A limit counts before a request.
        let order = |was: (i64, i64), is: (i64, i64)| if was.1 == is.1 { was.0 < is.0 } else { was.1 < is.1 };
        for (list, changes, was, is) in [
            (
                &mut resize.memory,
                memory,
                (from.memory_request, from.memory_limit),
                (to.memory_request, to.memory_limit),
            ),
            (&mut resize.cpu, cpu, (from.cpu_request, from.cpu_limit), (to.cpu_request, to.cpu_limit)),
        ] {
            match (changes, order(was, is)) {
                (false, _) => {}
                (true, true) => list.push(update.clone()),
                (true, false) => list.insert(0, update.clone()),
            }
        }
        false
    }

    /// The pod's own part: its cgroup and its own resources.
    pub(super) fn resize_pod(&mut self) {
        let Some(has) = self.input.has else { return };
        let ends = self.ended || self.plan.sandbox == SandboxStep::None;
        self.plan.resize = if ends { None } else { with_pod_resize(self.plan.resize.take(), self.input.pod, &has) };
    }
}

/// What is to be resized, with the pod's own part as it is known now: how its cgroup stands may be known only when the rest is planned.
pub fn with_pod_resize(planned: Option<Resize>, pod: &DesiredPod, has: &Has<'_>) -> Option<Resize> {
    let level = |r: Option<&model::api::ResourceRequirements>| r.map(|r| sizes(None, r)).unwrap_or_default();
    let spec = level(pod.spec().resources.as_ref());
    let due = has.cgroup_differs || (has.rules.pod_level && level(has.actuated.pod_level.as_ref()) != spec);
    let mut resize = planned.unwrap_or_default();
    resize.pod = due;
    (resize != Resize::default()).then_some(resize)
}
