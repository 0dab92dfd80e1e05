//! A brake for log lines that a fault would otherwise repeat many times a second.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Keys held at once; beyond this the ones whose interval is over are dropped, then new keys are let through unlimited.
const MAX_KEYS: usize = 1024;

/// Lets one line per key and interval through and counts those held back.
///
/// ```
/// # use std::time::{Duration, Instant};
/// let limiter = telemetry::LogLimiter::new(Duration::from_secs(60));
/// if let Some(suppressed) = limiter.allow("runtime down", Instant::now()) {
///     tracing::error!(suppressed, "Container runtime is down");
/// }
/// ```
#[derive(Debug)]
pub struct LogLimiter {
    interval: Duration,
    keys: Mutex<HashMap<String, Window>>,
}

#[derive(Debug)]
struct Window {
    opened: Instant,
    suppressed: u64,
}

impl LogLimiter {
    /// One line per key in each `interval`.
    pub fn new(interval: Duration) -> Self {
        Self { interval, keys: Mutex::new(HashMap::new()) }
    }

    /// `Some(n)` when the line may be written, n being the number of lines with this key held back since the last one;
    /// `None` when it is to be held back. `now` is the caller's clock.
    pub fn allow(&self, key: &str, now: Instant) -> Option<u64> {
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(window) = keys.get_mut(key) {
            if now.saturating_duration_since(window.opened) < self.interval {
                window.suppressed += 1;
                return None;
            }
            window.opened = now;
            return Some(std::mem::take(&mut window.suppressed));
        }
        if keys.len() >= MAX_KEYS {
            keys.retain(|_, window| now.saturating_duration_since(window.opened) < self.interval);
        }
        if keys.len() < MAX_KEYS {
            keys.insert(key.to_owned(), Window { opened: now, suppressed: 0 });
        }
        Some(0)
    }

    /// Forgets a key, so that its next line is written at once: for a fault that healed.
    pub fn forget(&self, key: &str) {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_per_key_and_interval() {
        let limiter = LogLimiter::new(Duration::from_secs(10));
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(limiter.allow("a", at(0)), Some(0));
        assert_eq!(limiter.allow("a", at(1)), None);
        assert_eq!(limiter.allow("b", at(1)), Some(0));
        assert_eq!(limiter.allow("a", at(9)), None);
        assert_eq!(limiter.allow("a", at(10)), Some(2));
        assert_eq!(limiter.allow("a", at(11)), None);
        limiter.forget("a");
        assert_eq!(limiter.allow("a", at(12)), Some(0));
    }

    #[test]
    fn the_number_of_keys_is_bounded() {
        let limiter = LogLimiter::new(Duration::from_secs(10));
        let start = Instant::now();
        for i in 0..3 * MAX_KEYS {
            assert_eq!(limiter.allow(&i.to_string(), start), Some(0));
        }
        assert_eq!(limiter.keys.lock().unwrap().len(), MAX_KEYS);
        // Once the old windows are over they make room.
        let later = start + Duration::from_secs(10);
        assert_eq!(limiter.allow("new", later), Some(0));
        assert_eq!(limiter.allow("new", later), None);
        assert_eq!(limiter.keys.lock().unwrap().len(), 1);
    }
}
