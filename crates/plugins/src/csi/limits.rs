//! How many volumes a driver can take on the node may change while it runs: those that say so (`CSIDriver.spec.nodeAllocatableUpdatePeriodSeconds`,
//! KEP-4876) are asked again and again.
//!
//! Task: [`run`], owned by who starts it, ends with `stop`; it sleeps for as long as no registered driver has a period. Inputs: the registered
//! drivers and the periods, both as newest values. Queue: none. Deadline: that of the call; a driver that hangs is not asked a second time
//! meanwhile, and holds up no other one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use decide::node::csi::Drivers as Registered;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Periods by driver.
pub type Periods = BTreeMap<String, Duration>;

/// A driver that is asked.
struct Asked {
    period: Duration,
    next: Instant,
    asking: Option<JoinHandle<()>>,
}

/// Has each driver that wants it asked once a period, by `ask`.
pub async fn run<F>(
    mut registered: watch::Receiver<Arc<Registered>>,
    mut periods: watch::Receiver<Arc<Periods>>,
    ask: impl Fn(String) -> F,
    stop: CancellationToken,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let mut all: BTreeMap<String, Asked> = BTreeMap::new();
    loop {
        let now = Instant::now();
        let wanted = wanted(&registered.borrow_and_update(), &periods.borrow_and_update());
        all.retain(|name, asked| wanted.get(name) == Some(&asked.period));
        for (name, period) in wanted {
            all.entry(name).or_insert(Asked { period, next: now + period, asking: None });
        }
        for (name, asked) in all.iter_mut().filter(|(_, a)| a.next <= now) {
            asked.next = now + asked.period;
            if asked.asking.as_ref().is_none_or(JoinHandle::is_finished) {
                asked.asking = Some(tokio::spawn(ask(name.clone())));
            }
        }
        let next = all.values().map(|a| a.next).min();
        let due = async {
            match next {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = stop.cancelled() => return,
            changed = registered.changed() => if changed.is_err() { return },
            changed = periods.changed() => if changed.is_err() { return },
            () = due => {}
        }
    }
}

fn wanted(registered: &Registered, periods: &Periods) -> Periods {
    let there = periods.iter().filter(|(name, _)| registered.get(*name).is_some_and(Option::is_some));
    there.map(|(name, period)| (name.clone(), *period)).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use decide::node::csi::DriverNode;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn drivers_are_asked_once_a_period() {
        let there = |names: &[&str]| -> Arc<Registered> {
            Arc::new(names.iter().map(|n| ((*n).to_owned(), Some(DriverNode::default()))).collect())
        };
        let every = |all: &[(&str, u64)]| -> Arc<Periods> {
            Arc::new(all.iter().map(|(n, s)| ((*n).to_owned(), Duration::from_secs(*s))).collect())
        };
        let (drivers, registered) = watch::channel(there(&["a", "hung", "plain"]));
        let (objects, periods) = watch::channel(every(&[("a", 10), ("hung", 10), ("away", 10)]));
        let (asked, stop) = (Arc::new(Mutex::new(Vec::new())), CancellationToken::new());
        let note = asked.clone();
        let ask = move |name: String| {
            note.lock().unwrap().push(name.clone());
            async move {
                if name == "hung" {
                    std::future::pending().await
                }
            }
        };
        let task = tokio::spawn(run(registered, periods, ask, stop.clone()));
        let taken = || std::mem::take(&mut *asked.lock().unwrap());
        tokio::time::sleep(Duration::from_secs(9)).await;
        assert!(taken().is_empty());
        tokio::time::sleep(Duration::from_secs(12)).await;
        assert_eq!(taken(), ["a", "hung", "a"], "one that hangs is not asked a second time");
        objects.send_replace(every(&[("a", 100), ("plain", 5)]));
        tokio::time::sleep(Duration::from_secs(11)).await;
        assert_eq!(taken(), ["plain", "plain"]);
        drivers.send_replace(there(&["a"]));
        tokio::time::sleep(Duration::from_secs(80)).await;
        assert!(taken().is_empty());
        tokio::time::sleep(Duration::from_secs(20)).await;
        assert_eq!(taken(), ["a"]);
        stop.cancel();
        task.await.unwrap();
    }
}
