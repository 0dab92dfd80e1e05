//! Thresholds, as the configuration gives them.

use std::collections::BTreeMap;
use std::time::Duration;

use model::quantity::{Format, Quantity, QuantityError};

use super::signal::{Disks, Signal};

/// An amount, or a share of the whole.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// An amount.
    Quantity(Quantity),
    /// A share of the capacity, between 0 and 1, in the precision in which Go reads it.
    Share(f32),
}

impl Value {
    /// The amount, of `capacity` units. A share of inodes is written in the binary form too, as Go does.
    pub fn of(&self, capacity: i64) -> Quantity {
        match self {
            Self::Quantity(quantity) => quantity.clone(),
            Self::Share(share) => Quantity::from_value((capacity as f64 * f64::from(*share)) as i64, Format::BinarySI),
        }
    }
}

/// When there is too little of something.
#[derive(Clone, Debug, PartialEq)]
pub struct Threshold {
    /// What is measured.
    pub signal: Signal,
    /// Less than this is too little.
    pub value: Value,
    /// How long there may be too little before something is done; zero: a hard threshold.
    pub grace: Duration,
    /// How much above the threshold there must be before it is enough again.
    pub min_reclaim: Option<Value>,
}

impl Threshold {
    /// Something is done at once, and pods get hardly any time.
    pub fn is_hard(&self) -> bool {
        self.grace.is_zero()
    }

    /// The same of another signal.
    fn of_signal(&self, signal: Signal) -> Self {
        Self { signal, ..self.clone() }
    }
}

/// What is configured (KubeletConfiguration).
#[derive(Clone, Copy, Debug)]
pub struct Settings<'a> {
    /// `evictionHard`, with the defaults where they belong.
    pub hard: &'a BTreeMap<String, String>,
    /// `evictionSoft`.
    pub soft: &'a BTreeMap<String, String>,
    /// `evictionSoftGracePeriod`, read.
    pub soft_grace: &'a BTreeMap<String, Duration>,
    /// `evictionMinimumReclaim`.
    pub minimum_reclaim: &'a BTreeMap<String, String>,
    /// `enforceNodeAllocatable` has `pods`: the hard threshold of memory holds for the pods' group too.
    pub allocatable_enforced: bool,
}

/// A threshold that cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ThresholdError {
    /// There is no such signal.
    #[error("unsupported eviction signal {0}")]
    Signal(String),
    /// A soft threshold without its period.
    #[error("grace period must be specified for the soft eviction threshold {0}")]
    NoGrace(&'static str),
    /// Not an amount.
    #[error("eviction threshold {signal}: {source}")]
    Quantity {
        /// Of this signal.
        signal: &'static str,
        /// Why.
        source: QuantityError,
    },
    /// Not a share.
    #[error("eviction percentage threshold {signal} must be between 0% and 100%: {text}")]
    Share {
        /// Of this signal.
        signal: &'static str,
        /// As configured.
        text: String,
    },
    /// An amount of nothing or less.
    #[error("eviction threshold {signal} must be positive: {text}")]
    NotPositive {
        /// Of this signal.
        signal: &'static str,
        /// As configured.
        text: String,
    },
}

/// The thresholds, those that are dealt with first in front: memory before all else, hard ones before soft ones.
///
/// What the configuration says of the writable layers' file system does not count: it is the one of the root directory or that of the images, and
/// has that one's thresholds (KEP-4191).
///
/// # Errors
/// A threshold that cannot be; the validation of the configuration says the same sooner.
pub fn thresholds(settings: &Settings<'_>, disks: Disks) -> Result<Vec<Threshold>, ThresholdError> {
    let reclaim = |signal: Signal| -> Result<Option<Value>, ThresholdError> {
        let Some(text) = settings.minimum_reclaim.get(signal.as_str()) else { return Ok(None) };
        value(signal, text, false)
    };
    let mut all = Vec::new();
    for (map, soft) in [(settings.hard, false), (settings.soft, true)] {
        for (name, text) in map {
            let signal = Signal::parse(name).ok_or_else(|| ThresholdError::Signal(name.clone()))?;
            let grace = match soft {
                false => Duration::ZERO,
                true => *settings.soft_grace.get(name).ok_or(ThresholdError::NoGrace(signal.as_str()))?,
            };
            // 0% and 100% switch a threshold off.
            let Some(value) = value(signal, text, true)? else { continue };
            all.push(Threshold { signal, value, grace, min_reclaim: reclaim(signal)? });
        }
    }
    all.retain(|t| disks.layers_follow(t.signal).is_none());
    if settings.allocatable_enforced {
        let of_memory = all.iter().filter(|t| t.signal == Signal::MemoryAvailable && t.is_hard());
        let allocatable: Vec<_> = of_memory.map(|t| t.of_signal(Signal::AllocatableMemoryAvailable)).collect();
        all.extend(allocatable);
    }
    for signal in Signal::ALL {
        if let Some(followed) = disks.layers_follow(signal) {
            let same: Vec<_> = all.iter().filter(|t| t.signal == followed).map(|t| t.of_signal(signal)).collect();
            all.extend(same);
        }
    }
    all.sort_by_key(|t| (t.signal.resource() != super::Resource::Memory, !t.is_hard(), t.signal));
    Ok(all)
}

/// Reads a threshold, or a minimum to win back. None: switched off.
fn value(signal: Signal, text: &str, threshold: bool) -> Result<Option<Value>, ThresholdError> {
    let name = signal.as_str();
    if let Some(number) = text.strip_suffix('%') {
        if threshold && (number == "0" || number == "100") {
            return Ok(None);
        }
        let wrong = || ThresholdError::Share { signal: name, text: text.to_owned() };
        let percent: f32 = number.trim_end_matches('%').parse().map_err(|_| wrong())?;
        let share = percent / 100.0;
        // A share of 0 that is not written "0%" never is too little; one to win back must be more.
        let right = if threshold { (0.0..=1.0).contains(&share) } else { share > 0.0 && share.is_finite() };
        return if right { Ok(Some(Value::Share(share))) } else { Err(wrong()) };
    }
    let quantity = Quantity::parse(text).map_err(|source| ThresholdError::Quantity { signal: name, source })?;
    if quantity.sign() < 0 || threshold && quantity.is_zero() {
        return Err(ThresholdError::NotPositive { signal: name, text: text.to_owned() });
    }
    Ok(Some(Value::Quantity(quantity)))
}
