//! Exponential backoff with jitter.

use std::time::Duration;

use tokio::time::Instant;

use crate::Unit;

/// Grows from `initial` by `factor` to `max`; each wait is multiplied by 1…1+`jitter`; starts over after `reset` without a call.
#[derive(Clone)]
pub struct Backoff {
    initial: Duration,
    max: Duration,
    factor: f64,
    jitter: f64,
    reset: Duration,
    unit: Unit,
    next: Duration,
    last: Option<Instant>,
}

impl std::fmt::Debug for Backoff {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Backoff").field("next", &self.next).field("max", &self.max).finish_non_exhaustive()
    }
}

impl Backoff {
    /// A backoff that doubles, with jitter 1 (waits of once to twice the nominal time).
    pub fn new(initial: Duration, max: Duration, unit: Unit) -> Self {
        Self {
            initial,
            max,
            factor: 2.0,
            jitter: 1.0,
            reset: Duration::from_secs(120),
            unit,
            next: initial,
            last: None,
        }
    }

    /// The figures of client-go's reflector: 800 ms to 30 s, forgotten after 2 minutes.
    pub fn reflector(unit: Unit) -> Self {
        Self::new(Duration::from_millis(800), Duration::from_secs(30), unit)
    }

    /// With another jitter.
    #[must_use]
    pub fn with_jitter(mut self, jitter: f64) -> Self {
        self.jitter = jitter;
        self
    }

    /// How long to wait now; counts as one failure.
    pub fn next_delay(&mut self) -> Duration {
        let now = Instant::now();
        if self.last.is_some_and(|last| now.duration_since(last) > self.reset) {
            self.next = self.initial;
        }
        let base = self.next;
        self.next = base.mul_f64(self.factor).min(self.max);
        let delay = base.mul_f64(1.0 + (self.unit)() * self.jitter);
        // The wait itself is not quiet time.
        self.last = Some(now + delay);
        delay
    }

    /// Forgets all failures.
    pub fn reset(&mut self) {
        self.next = self.initial;
        self.last = None;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn doubles_to_the_cap_and_forgets_after_quiet_time() {
        let mut b = Backoff::reflector(Arc::new(|| 0.0));
        let ms: Vec<u128> = (0..8).map(|_| b.next_delay().as_millis()).collect();
        assert_eq!(ms, [800, 1600, 3200, 6400, 12800, 25600, 30000, 30000]);
        tokio::time::advance(Duration::from_secs(149)).await;
        assert_eq!(b.next_delay().as_millis(), 30000);
        tokio::time::advance(Duration::from_secs(151)).await;
        assert_eq!(b.next_delay().as_millis(), 800);
        b.reset();
        assert_eq!(b.next_delay().as_millis(), 800);
    }

    #[tokio::test(start_paused = true)]
    async fn jitter_only_lengthens() {
        let mut b = Backoff::new(Duration::from_secs(1), Duration::from_secs(8), Arc::new(|| 0.5));
        assert_eq!(b.next_delay(), Duration::from_millis(1500));
        let mut b = Backoff::new(Duration::from_secs(1), Duration::from_secs(8), Arc::new(|| 0.5)).with_jitter(0.1);
        assert_eq!(b.next_delay(), Duration::from_millis(1050));
    }
}
