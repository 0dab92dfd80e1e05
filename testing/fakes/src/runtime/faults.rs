//! Faults: rules that say which calls go wrong, and how.

use std::time::Duration;

use cri_api::v1;
use prost::Message;
use rand::Rng;
use rand::rngs::SmallRng;

/// How a call goes wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Not done, and answered with this gRPC code and message.
    Fail(i32, String),
    /// Done, but only after this time.
    Delay(Duration),
    /// Not done, and never answered.
    Hang,
    /// Done, but never answered.
    DoAndHang,
    /// Done, but the connection is lost before the answer.
    LoseAnswer,
    /// Done, and answered this much later: what a list says is old by then.
    LateAnswer(Duration),
    /// Done, and the answer grown to this many bytes. Lists must have an item for that.
    Pad(usize),
}

/// Which calls a fault befalls. The first rule that fits a call is used, in the order in which they were given.
#[derive(Clone, Debug)]
pub struct Rule {
    call: &'static str,
    subject: Option<String>,
    fault: Fault,
    left: Option<u32>,
    chance: f64,
}

impl Rule {
    /// Every call of this method; `*`: of any method.
    pub fn new(call: &'static str, fault: Fault) -> Self {
        Self { call, subject: None, fault, left: None, chance: 1.0 }
    }

    /// Whether calls that it befalls are never answered.
    pub fn hangs(&self) -> bool {
        matches!(self.fault, Fault::Hang | Fault::DoAndHang)
    }

    /// Whether it may befall calls of this method.
    pub fn befalls(&self, call: &str) -> bool {
        self.call == "*" || self.call == call
    }

    /// Only so many times.
    #[must_use]
    pub fn times(self, times: u32) -> Self {
        Self { left: Some(times), ..self }
    }

    /// Only with this chance, from 0 to 1. Same seed and same calls: same faults.
    #[must_use]
    pub fn chance(self, chance: f64) -> Self {
        Self { chance, ..self }
    }

    /// Only calls whose subject contains this (see [`Call::subject`](super::calls::Call::subject)).
    #[must_use]
    pub fn about(self, subject: impl Into<String>) -> Self {
        Self { subject: Some(subject.into()), ..self }
    }
}

#[derive(Default)]
pub(crate) struct Faults {
    rules: Vec<Rule>,
}

impl Faults {
    pub(crate) fn add(&mut self, rule: Rule) {
        self.rules.push(rule);
    }

    pub(crate) fn clear(&mut self) {
        self.rules.clear();
    }

    pub(crate) fn pick(&mut self, call: &str, subject: &str, random: &mut SmallRng) -> Option<Fault> {
        let rule = self.rules.iter_mut().find(|rule| {
            (rule.call == "*" || rule.call == call)
                && rule.left != Some(0)
                && rule.subject.as_deref().is_none_or(|part| subject.contains(part))
                && (rule.chance >= 1.0 || random.random_bool(rule.chance))
        })?;
        rule.left = rule.left.map(|left| left - 1);
        Some(rule.fault.clone())
    }
}

/// Answers that can be made larger.
pub(crate) trait Pad: Message + Default {
    /// Puts this many bytes of filling into it, instead of former filling; false if there is no place for them.
    fn fill(&mut self, _size: usize) -> bool {
        false
    }
}

/// Grows an answer to this many bytes on the wire.
pub(crate) fn pad(answer: &mut impl Pad, size: usize) {
    if !answer.fill(0) {
        return;
    }
    let mut filling = size.saturating_sub(answer.encoded_len());
    // Each length that encloses the filling may take more bytes too; a few rounds meet the size.
    for _ in 0..8 {
        answer.fill(filling);
        match answer.encoded_len() {
            length if length > size => filling = filling.saturating_sub(length - size),
            length if length < size => filling += size - length,
            _ => return,
        }
    }
}

type Notes = std::collections::BTreeMap<String, String>;

fn note(notes: Option<&mut Notes>, size: usize) -> bool {
    notes.map(|notes| notes.insert("padding".into(), "x".repeat(size))).is_some()
}

macro_rules! pad_notes {
    ($($message:ident: |$answer:ident| $notes:expr;)*) => {$(
        impl Pad for v1::$message {
            fn fill(&mut self, size: usize) -> bool {
                let $answer = self;
                note($notes, size)
            }
        }
    )*};
}
pad_notes! {
    ListPodSandboxResponse: |a| a.items.first_mut().map(|item| &mut item.annotations);
    StreamPodSandboxesResponse: |a| a.pod_sandboxes.first_mut().map(|item| &mut item.annotations);
    ListContainersResponse: |a| a.containers.first_mut().map(|item| &mut item.annotations);
    StreamContainersResponse: |a| a.containers.first_mut().map(|item| &mut item.annotations);
    ListContainerStatsResponse: |a| a.stats.first_mut().and_then(|item| item.attributes.as_mut()).map(|a| &mut a.annotations);
    ListPodSandboxStatsResponse: |a| a.stats.first_mut().and_then(|item| item.attributes.as_mut()).map(|a| &mut a.annotations);
    ListImagesResponse: |a| a.images.first_mut().and_then(|item| item.spec.as_mut()).map(|spec| &mut spec.annotations);
    StreamImagesResponse: |a| a.images.first_mut().and_then(|item| item.spec.as_mut()).map(|spec| &mut spec.annotations);
    StatusResponse: |a| Some(&mut a.info);
    PodSandboxStatusResponse: |a| Some(&mut a.info);
    ContainerStatusResponse: |a| Some(&mut a.info);
    ImageStatusResponse: |a| Some(&mut a.info);
}

impl Pad for v1::ExecSyncResponse {
    fn fill(&mut self, size: usize) -> bool {
        self.stdout = vec![b'x'; size];
        true
    }
}

macro_rules! no_padding {
    ($($message:ident)*) => {$( impl Pad for v1::$message {} )*};
}
no_padding! {
    VersionResponse RuntimeConfigResponse UpdateRuntimeConfigResponse RunPodSandboxResponse StopPodSandboxResponse
    RemovePodSandboxResponse UpdatePodSandboxResourcesResponse PortForwardResponse CreateContainerResponse
    StartContainerResponse StopContainerResponse RemoveContainerResponse UpdateContainerResourcesResponse
    ReopenContainerLogResponse ExecResponse AttachResponse CheckpointContainerResponse ContainerStatsResponse
    StreamContainerStatsResponse PodSandboxStatsResponse StreamPodSandboxStatsResponse ListMetricDescriptorsResponse
    ListPodSandboxMetricsResponse StreamPodSandboxMetricsResponse PullImageResponse RemoveImageResponse
    ImageFsInfoResponse
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_meets_the_size() {
        for size in [1_000, 100_000, 4_089_446, 16_672_358, 17_825_792] {
            let mut answer = v1::ListContainersResponse { containers: vec![v1::Container::default(); 3] };
            pad(&mut answer, size);
            assert_eq!(answer.encoded_len(), size);
        }
    }
}
