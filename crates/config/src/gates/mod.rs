//! Feature gates: which exist, which are on, and what may not be set.

mod table;

use std::collections::BTreeMap;

use model::report::Severity;

pub use table::Gate;
use table::{KUBELET, NEEDS, OTHERS, Spec};

use crate::problem::Problem;
use crate::tree::join;

/// How settled a feature is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Off by default, may vanish.
    Alpha,
    /// May still change.
    Beta,
    /// Done; the gate goes in a later release.
    Ga,
    /// The feature itself goes in a later release.
    Deprecated,
}

/// The gates as they are in effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gates {
    on: BTreeMap<&'static str, bool>,
}

fn specs() -> impl Iterator<Item = &'static Spec> {
    KUBELET.iter().chain(OTHERS)
}

fn find(name: &str) -> Option<(&'static Spec, bool)> {
    let of = |list: &'static [Spec]| list.iter().find(|spec| spec.name == name);
    of(KUBELET).map(|spec| (spec, true)).or_else(|| of(OTHERS).map(|spec| (spec, false)))
}

impl Default for Gates {
    fn default() -> Self {
        Self { on: specs().map(|spec| (spec.name, spec.default)).collect() }
    }
}

impl Gates {
    /// Is the gate on?
    #[must_use]
    pub fn enabled(&self, gate: Gate) -> bool {
        self.on.get(gate.name()).copied().unwrap_or(false)
    }

    /// Is the gate of this name on? None: no such gate.
    #[must_use]
    pub fn enabled_by_name(&self, name: &str) -> Option<bool> {
        self.on.get(name).copied()
    }

    /// Gates that stand elsewhere than their default, with their value.
    pub fn changed(&self) -> impl Iterator<Item = (&'static str, bool)> + '_ {
        specs().filter_map(|spec| {
            let on = self.on.get(spec.name).copied()?;
            (on != spec.default).then_some((spec.name, on))
        })
    }

    /// Every gate with its stage, name order.
    #[must_use]
    pub fn stages() -> BTreeMap<&'static str, Stage> {
        specs().map(|spec| (spec.name, spec.stage)).collect()
    }

    /// The gates after `set`; what cannot be done goes to `out` under paths below `at`, and is left at its default.
    ///
    /// `AllAlpha` and `AllBeta` move the gates of their stage that `set` does not name.
    pub(crate) fn with(set: &BTreeMap<String, bool>, at: &str, out: &mut Vec<Problem>) -> Self {
        let mut gates = Self::default();
        for (name, stage) in [("AllAlpha", Stage::Alpha), ("AllBeta", Stage::Beta)] {
            if let Some(&value) = set.get(name) {
                let moved = specs().filter(|spec| spec.stage == stage && !spec.locked);
                gates.on.extend(moved.map(|spec| (spec.name, value)));
            }
        }
        let before = out.len();
        for (name, &value) in set {
            if name == "AllAlpha" || name == "AllBeta" {
                continue;
            }
            let here = join(at, name);
            let Some((spec, kubelet)) = find(name) else {
                out.push(Problem::error(here, format!("unrecognized feature gate: {name}")));
                continue;
            };
            if spec.locked && value != spec.default {
                let locked = spec.default;
                out.push(Problem::error(
                    here,
                    format!("cannot set feature gate {name} to {value}, feature is locked to {locked}"),
                ));
                continue;
            }
            gates.on.insert(spec.name, value);
            if !kubelet {
                let text = format!("feature gate {name} changes nothing on a node");
                out.push(Problem::warning(here.clone(), text));
            }
            let kind = match spec.stage {
                Stage::Ga => "GA",
                Stage::Deprecated => "deprecated",
                Stage::Alpha | Stage::Beta => continue,
            };
            out.push(Problem::warning(
                here,
                format!(
                    "Warning: setting {kind} feature gate. It will be removed in a future release. featureGate=\"{name}\" value={value}"
                ),
            ));
        }
        if out[before..].iter().all(|p| p.severity < Severity::Error) {
            gates.check_needs(at, out);
        }
        gates
    }

    fn check_needs(&self, at: &str, out: &mut Vec<Problem>) {
        let on = |name: &str| self.on.get(name).copied().unwrap_or(false);
        for &(name, needs) in NEEDS {
            let off: Vec<_> = needs.iter().copied().filter(|need| !on(need)).collect();
            if on(name) && !off.is_empty() {
                let off = off.join(" ");
                out.push(Problem::error(
                    join(at, name),
                    format!("{name} is enabled, but depends on features that are disabled: [{off}]"),
                ));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(set: &[(&str, bool)]) -> (Gates, Vec<String>) {
        let set = set.iter().map(|&(k, v)| (k.to_owned(), v)).collect();
        let mut out = Vec::new();
        let gates = Gates::with(&set, "featureGates", &mut out);
        (gates, out.into_iter().map(|p| p.message).collect())
    }

    #[test]
    fn registry() {
        assert_eq!(specs().count(), 240, "242 of 1.36.1 with AllAlpha and AllBeta");
        let gates = Gates::default();
        assert!(gates.enabled(Gate::KubeletPSI));
        assert!(!gates.enabled(Gate::EventedPLEG));
        assert_eq!(gates.enabled_by_name("Nope"), None);
        assert_eq!(gates.changed().count(), 0);
        for &(name, needs) in NEEDS {
            assert!(find(name).is_some(), "{name}");
            assert!(needs.iter().all(|n| find(n).is_some()), "{name}");
        }
        let (_, messages) = with(&[]);
        assert!(messages.is_empty(), "defaults depend on nothing that is off: {messages:?}");
    }

    #[test]
    fn go_messages() {
        let (_, m) = with(&[("Foo", true), ("NodeSwap", false)]);
        assert_eq!(
            m,
            ["unrecognized feature gate: Foo", "cannot set feature gate NodeSwap to false, feature is locked to true",]
        );
        let (_, m) = with(&[("GracefulNodeShutdown", false), ("GracefulNodeShutdownBasedOnPodPriority", false)]);
        assert_eq!(
            m,
            [
                "WindowsGracefulNodeShutdown is enabled, but depends on features that are disabled: [GracefulNodeShutdown]"
            ]
        );
        let (gates, m) = with(&[("NodeSwap", true), ("HPAScaleToZero", true)]);
        assert_eq!(m.len(), 2, "{m:?}");
        assert_eq!(gates.changed().collect::<Vec<_>>(), [("HPAScaleToZero", true)]);
    }

    #[test]
    fn all_alpha_spares_what_is_named() {
        let (gates, m) = with(&[("AllAlpha", true), ("EventedPLEG", false)]);
        assert!(m.is_empty(), "{m:?}");
        assert!(!gates.enabled(Gate::EventedPLEG));
        assert!(gates.enabled(Gate::MemoryQoS));
        assert!(!gates.enabled(Gate::SELinuxMount), "beta stays");
        let (gates, _) = with(&[("AllBeta", false)]);
        assert!(!gates.enabled(Gate::ComponentFlagz));
        assert!(gates.enabled(Gate::NodeSwap));
    }
}
