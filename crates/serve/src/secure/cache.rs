//! Answers that are kept for a while, and asked for once however many wait.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::OnceCell;
use tokio::time::Instant;

type Slot<V> = Arc<OnceCell<(V, Instant)>>;

/// Answers by question, each with an end of its own. Bounded: a full cache drops what has ended, and if that frees nothing, everything; the
/// answers are then asked for again.
pub(crate) struct TtlCache<K, V> {
    slots: Mutex<HashMap<K, Slot<V>>>,
    capacity: usize,
}

impl<K: Eq + Hash + Clone, V: Clone> TtlCache<K, V> {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { slots: Mutex::new(HashMap::new()), capacity }
    }

    /// The kept answer, else that of `ask`, which is polled only then, with how long to keep it. Callers with the same question wait for the first one's answer; failures
    /// are not kept.
    pub(crate) async fn get<E>(&self, key: K, ask: impl Future<Output = Result<(V, Duration), E>>) -> Result<V, E> {
        let slot = self.slot(&key);
        let asked = async { ask.await.map(|(value, keep)| (value, Instant::now() + keep)) };
        let answer = slot.get_or_try_init(|| asked).await;
        match answer {
            Ok((value, _)) => Ok(value.clone()),
            Err(e) => {
                let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
                // Unless another has an answer meanwhile.
                if slots.get(&key).is_some_and(|s| Arc::ptr_eq(s, &slot) && !s.initialized()) {
                    slots.remove(&key);
                }
                Err(e)
            }
        }
    }

    fn slot(&self, key: &K) -> Slot<V> {
        let now = Instant::now();
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = |slot: &Slot<V>| slot.get().is_some_and(|(_, end)| *end <= now);
        if let Some(slot) = slots.get(key).filter(|s| !ended(s)) {
            return slot.clone();
        }
        if slots.len() >= self.capacity {
            slots.retain(|_, slot| !ended(slot));
            if slots.len() >= self.capacity {
                slots.clear();
            }
        }
        let slot = Slot::default();
        slots.insert(key.clone(), slot.clone());
        slot
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn kept_for_its_time_and_asked_for_once() {
        let cache = TtlCache::<&str, usize>::new(2);
        let asked = AtomicUsize::new(0);
        let ask = async |keep: u64| {
            cache
                .get("a", async {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                    Ok::<_, ()>((asked.fetch_add(1, Ordering::Relaxed), Duration::from_secs(keep)))
                })
                .await
        };
        let (one, two) = tokio::join!(ask(5), ask(5));
        assert_eq!((one, two), (Ok(0), Ok(0)));
        tokio::time::advance(Duration::from_secs(4)).await;
        assert_eq!(ask(5).await, Ok(0));
        tokio::time::advance(Duration::from_secs(2)).await;
        assert_eq!(ask(5).await, Ok(1));
    }

    #[tokio::test(start_paused = true)]
    async fn failures_are_not_kept_and_the_size_is_bounded() {
        let cache = TtlCache::<usize, usize>::new(2);
        assert_eq!(cache.get(1, async { Err("down") }).await, Err("down"));
        let keep = Duration::from_secs(5);
        assert_eq!(cache.get(1, async { Ok::<_, ()>((7, keep)) }).await, Ok(7));
        for n in 0..100 {
            assert_eq!(cache.get(n, async { Ok::<_, ()>((n, keep)) }).await, Ok(if n == 1 { 7 } else { n }), "{n}");
            assert!(cache.slots.lock().unwrap().len() <= 2);
        }
    }
}
