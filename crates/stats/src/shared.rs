//! One collection for everybody who asks within a while, and nothing kept for nobody.
//!
//! A value is made when it is asked for. Those who ask meanwhile wait for it; those who ask soon after get the same. When nobody asks any
//! more it is forgotten: by a task that lives no longer than the value. An asker that goes away while it makes a value leaves the making
//! to the next one.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::Instant;

/// A value with the time at which it was made.
type Made<T> = (Instant, Arc<T>);

/// See the module.
#[derive(Debug)]
pub(crate) struct Shared<T> {
    fresh: Duration,
    keep: Duration,
    slot: Arc<Mutex<Option<Made<T>>>>,
}

impl<T: Send + Sync + 'static> Shared<T> {
    /// Values that are given again for `fresh`, and given to their successors for `keep`.
    pub(crate) fn new(fresh: Duration, keep: Duration) -> Self {
        Self { fresh, keep: keep.max(fresh), slot: Arc::default() }
    }

    /// The newest value if it is fresh and good enough, else a new one, which is made from the one before and its age.
    pub(crate) async fn get<E, F>(
        &self,
        good: impl FnOnce(&T) -> bool,
        make: impl FnOnce(Option<(Arc<T>, Duration)>) -> F,
    ) -> Result<Arc<T>, E>
    where
        F: Future<Output = Result<T, E>>,
    {
        let mut slot = self.slot.lock().await;
        let before = slot.as_ref().map(|(at, value)| (value.clone(), at.elapsed()));
        if let Some((value, age)) = &before
            && *age < self.fresh
            && good(value)
        {
            return Ok(value.clone());
        }
        let value = Arc::new(make(before.filter(|(_, age)| *age < self.keep)).await?);
        let made = Instant::now();
        *slot = Some((made, value.clone()));
        let (held, keep) = (Arc::downgrade(&self.slot), self.keep);
        tokio::spawn(async move {
            tokio::time::sleep(keep).await;
            if let Some(slot) = held.upgrade() {
                let mut slot = slot.lock().await;
                if slot.as_ref().is_some_and(|(at, _)| *at == made) {
                    *slot = None;
                }
            }
        });
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_collection_serves_all_who_ask_at_once() {
        let shared = Shared::<u32>::new(Duration::from_secs(2), Duration::from_secs(60));
        let made = AtomicU32::new(0);
        let ask = || {
            shared.get::<Infallible, _>(
                |_| true,
                |_| async {
                    tokio::time::sleep(Duration::from_millis(300)).await;
                    Ok(made.fetch_add(1, Ordering::Relaxed))
                },
            )
        };
        let all = futures::future::join_all((0..50).map(|_| ask())).await;
        assert!(all.iter().all(|v| **v.as_ref().unwrap() == 0));
        tokio::time::sleep(Duration::from_millis(1900)).await;
        assert_eq!(*ask().await.unwrap(), 0);
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(*ask().await.unwrap(), 1);
        assert_eq!(made.load(Ordering::Relaxed), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn the_one_before_is_given_on_and_forgotten() {
        let shared = Shared::<u32>::new(Duration::from_secs(2), Duration::from_secs(60));
        let ask = |good: bool| {
            shared.get::<Infallible, _>(
                move |_| good,
                |before| async move { Ok(before.map_or(0, |(value, age)| *value + age.as_secs() as u32)) },
            )
        };
        assert_eq!(*ask(true).await.unwrap(), 0);
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(*ask(false).await.unwrap(), 1);
        tokio::time::sleep(Duration::from_secs(59)).await;
        assert_eq!(*ask(true).await.unwrap(), 60);
        tokio::time::sleep(Duration::from_secs(61)).await;
        assert!(shared.slot.lock().await.is_none());
        assert_eq!(*ask(true).await.unwrap(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn an_asker_that_goes_leaves_it_to_the_next() {
        let shared = Shared::<u32>::new(Duration::from_secs(2), Duration::from_secs(60));
        let slow = |_| async {
            tokio::time::sleep(Duration::from_secs(5)).await;
            Ok::<_, Infallible>(1)
        };
        assert!(tokio::time::timeout(Duration::from_secs(1), shared.get(|_| true, slow)).await.is_err());
        assert_eq!(*shared.get::<Infallible, _>(|_| true, |_| async { Ok(7) }).await.unwrap(), 7);
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_is_not_kept() {
        let shared = Shared::<u32>::new(Duration::from_secs(2), Duration::from_secs(60));
        assert_eq!(shared.get(|_| true, |_| async { Err("no") }).await, Err("no"));
        assert_eq!(*shared.get(|_| true, |_| async { Ok::<_, &str>(1) }).await.unwrap(), 1);
    }
}
