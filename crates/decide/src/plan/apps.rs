//! App containers: each by itself is kept, killed, started, or has ended.

use model::observed::{ContainerState, ObservedContainer};
use model::plan::{Kill, KillReason};
use model::pod::{ContainerEntry, ContainerKind};

use super::{Round, StartupVerdict, Wish, kill_message};
use crate::restart;

impl<'a> Round<'a> {
    /// Plans the app containers of an initialised pod.
    pub(super) fn apps(&mut self) {
        let pod = self.input.pod;
        let mut alive = false;
        for entry in pod.app_containers() {
            let wish = self.app(&entry);
            if wish == Wish::Start {
                self.start(&entry);
            }
            alive |= wish != Wish::Done;
        }
        if !alive {
            // Sidecars must not keep the pod alive.
            let sidecar = |k: &Kill| matches!(k.kind, Some(ContainerKind::Sidecar | ContainerKind::Init));
            self.plan.kill.retain(|k| !sidecar(k));
            self.end_pod();
        }
    }

    fn app(&mut self, entry: &ContainerEntry<'_>) -> Wish {
        let (pod, gates) = (self.input.pod, self.input.gates);
        // A run in an earlier sandbox counts for the restart policy.
        let newest = self.here(&entry.spec.name).or_else(|| self.input.observed.newest(&entry.spec.name));
        let Some(c) = newest else { return Wish::Start };
        match c.state {
            ContainerState::Created => Wish::Start,
            ContainerState::Exited if restart::restarts_after_exit(pod, entry.spec, c.exit_code, gates) => Wish::Start,
            ContainerState::Exited => Wish::Done,
            ContainerState::Unknown => {
                // It may still run: stopped first, so that there are never two of it.
                let message = "Container is in \"unknown\" state, try killing it before restart";
                self.kill(c, KillReason::UnknownState, message.into(), None);
                Wish::Start
            }
            ContainerState::Running if self.current.as_deref() == Some(&c.sandbox_id) => self.running_app(entry, c),
            // Alive in a sandbox that is no longer the pod's; already on the list of kills.
            ContainerState::Running => match restart::restarts_after_kill(pod, entry.spec, gates) {
                true => Wish::Start,
                false => Wish::Done,
            },
        }
    }

    fn running_app(&mut self, entry: &ContainerEntry<'_>, c: &'a ObservedContainer) -> Wish {
        let spec = entry.spec;
        let verdicts = (self.input.probes)(&c.id);
        let grace = |p: &Option<model::api::Probe>| p.as_ref().and_then(|p| p.termination_grace_period_seconds);
        let mut again = restart::restarts_after_kill(self.input.pod, spec, self.input.gates);
        let (reason, what, grace) = if self.changed(entry, c) {
            // A changed container runs anew whatever its restart policy: it has not run yet.
            again = true;
            (KillReason::DefinitionChanged, "definition changed", None)
        } else if spec.liveness_probe.is_some() && verdicts.liveness_failed {
            (KillReason::LivenessProbe, "failed liveness probe", grace(&spec.liveness_probe))
        } else if spec.startup_probe.is_some() && verdicts.startup == StartupVerdict::Failed {
            (KillReason::StartupProbe, "failed startup probe", grace(&spec.startup_probe))
        } else if self.resize_container(entry, c) {
            return Wish::Start;
        } else {
            return Wish::Keep;
        };
        let mut message = kill_message(entry.kind, &spec.name, what);
        if again {
            message.push_str(", will be restarted");
        }
        self.kill(c, reason, message, grace);
        if again { Wish::Start } else { Wish::Done }
    }
}
