//! The client-side rate limit: a token bucket whose waiters are served in order (`kubeAPIQPS`, `kubeAPIBurst`).

use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::Instant;

/// A token bucket.
#[derive(Debug)]
pub struct TokenBucket {
    qps: f64,
    burst: f64,
    state: Mutex<(f64, Instant)>,
}

impl TokenBucket {
    /// `qps` requests per second on average, `burst` at once. None when there is to be no limit: `qps` 0 or below, or not a number.
    pub fn new(qps: f64, burst: u32) -> Option<Self> {
        if qps.is_nan() || qps <= 0.0 {
            return None;
        }
        let burst = f64::from(burst.max(1));
        Some(Self { qps, burst, state: Mutex::new((burst, Instant::now())) })
    }

    /// Waits for a token. The lock is held while waiting, which keeps the order; dropping the future gives the place back.
    pub async fn acquire(&self) {
        let mut state = self.state.lock().await;
        let (tokens, at) = self.refilled(*state);
        if tokens < 1.0 {
            tokio::time::sleep(Duration::from_secs_f64((1.0 - tokens) / self.qps)).await;
            *state = (0.0, Instant::now());
        } else {
            *state = (tokens - 1.0, at);
        }
    }

    fn refilled(&self, (tokens, at): (f64, Instant)) -> (f64, Instant) {
        let now = Instant::now();
        ((tokens + now.duration_since(at).as_secs_f64() * self.qps).min(self.burst), now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn burst_then_rate() {
        let bucket = TokenBucket::new(50.0, 100).unwrap();
        let start = Instant::now();
        for _ in 0..100 {
            bucket.acquire().await;
        }
        assert_eq!(start.elapsed(), Duration::ZERO);
        for _ in 0..50 {
            bucket.acquire().await;
        }
        let took = start.elapsed();
        assert!(took >= Duration::from_millis(990) && took <= Duration::from_millis(1100), "{took:?}");
    }

    #[test]
    fn no_limit() {
        assert!(TokenBucket::new(-1.0, 10).is_none());
        assert!(TokenBucket::new(f64::NAN, 10).is_none());
    }
}
