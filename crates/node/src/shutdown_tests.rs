//! Shutdowns on a paused clock, with a service, pods and a file of the test's own.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::{mpsc, oneshot};

use super::*;
use crate::testing::Told;

/// Everything that the task did, in order.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    fn add(&self, line: impl Into<String>) {
        self.0.lock().unwrap().push(line.into());
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

struct FakeLock(Log);

impl Drop for FakeLock {
    fn drop(&mut self) {
        self.0.add("released");
    }
}

#[derive(Clone)]
struct FakeService {
    log: Log,
    delay: Arc<Mutex<Duration>>,
    /// How many looks a new delay takes to show.
    lag: Arc<AtomicUsize>,
    wanted: Arc<Mutex<Duration>>,
    events: Arc<Mutex<Vec<mpsc::UnboundedSender<bool>>>>,
    preparing: bool,
    down: Arc<AtomicUsize>,
}

#[async_trait]
impl ShutdownService for FakeService {
    async fn connect(&self) -> Result<Box<dyn ShutdownSession>, String> {
        if self.down.load(Ordering::Relaxed) > 0 {
            self.down.fetch_sub(1, Ordering::Relaxed);
            self.log.add("no bus");
            return Err("no bus".to_owned());
        }
        Ok(Box::new(self.clone()))
    }
}

#[async_trait]
impl ShutdownSession for FakeService {
    async fn max_delay(&self) -> Result<Duration, String> {
        let mut delay = self.delay.lock().unwrap();
        if self.lag.load(Ordering::Relaxed) == 0 {
            *delay = (*delay).max(*self.wanted.lock().unwrap());
        } else {
            self.lag.fetch_sub(1, Ordering::Relaxed);
        }
        Ok(*delay)
    }

    async fn set_max_delay(&self, delay: Duration) -> Result<(), String> {
        self.log.add(format!("delay {}", delay.as_secs()));
        *self.wanted.lock().unwrap() = delay;
        Ok(())
    }

    async fn is_shutting_down(&self) -> Result<bool, String> {
        Ok(self.preparing)
    }

    async fn inhibit(&self) -> Result<Lock, String> {
        self.log.add("locked");
        Ok(Box::new(FakeLock(self.log.clone())))
    }

    async fn shutdowns(&self) -> Result<BoxStream<'static, bool>, String> {
        let (sender, receiver) = mpsc::unbounded_channel();
        self.events.lock().unwrap().push(sender);
        let next =
            |mut from: mpsc::UnboundedReceiver<bool>| async move { from.recv().await.map(|event| (event, from)) };
        Ok(futures::stream::unfold(receiver, next).boxed())
    }
}

#[derive(Default)]
struct FakePods {
    log: Log,
    /// Pods and how long their ends take.
    pods: Mutex<BTreeMap<String, (ActivePod, Duration)>>,
}

#[async_trait]
impl NodePods for FakePods {
    fn active(&self) -> Vec<ActivePod> {
        self.pods.lock().unwrap().values().map(|(pod, _)| pod.clone()).collect()
    }

    async fn end(&self, uid: &PodUid, grace: i64) {
        self.log.add(format!("end {uid} in {grace}"));
        let takes = self.pods.lock().unwrap()[uid.as_str()].1;
        let (done, ended) = oneshot::channel();
        let (log, uid) = (self.log.clone(), uid.clone());
        // It goes on whoever waits.
        tokio::spawn(async move {
            tokio::time::sleep(takes).await;
            log.add(format!("{uid} ended"));
            let _ = done.send(());
        });
        let _ = ended.await;
    }

    async fn refuse(&self, shutting_down: bool) {
        self.log.add(if shutting_down { "refuse" } else { "accept" });
    }
}

struct World {
    log: Log,
    service: FakeService,
    told: Arc<Told>,
    metrics: Arc<Metrics>,
    not_ready: watch::Receiver<Vec<String>>,
    file: MemoryFile,
    tasks: Tasks,
}

#[derive(Clone, Default)]
struct MemoryFile(Arc<Mutex<Option<Vec<u8>>>>);

#[async_trait]
impl StateFile for MemoryFile {
    async fn read(&self) -> Result<Option<Vec<u8>>, String> {
        Ok(self.0.lock().unwrap().clone())
    }

    async fn write(&self, content: Vec<u8>) -> Result<(), String> {
        *self.0.lock().unwrap() = Some(content);
        Ok(())
    }
}

async fn settle() {
    tokio::time::sleep(Duration::from_millis(5)).await;
}

impl World {
    /// A node with pods: name, priority, grace, how long its end takes.
    async fn new(pods: &[(&str, i32, i64, u64)], change: impl FnOnce(&mut FakeService)) -> Self {
        let log = Log::default();
        let mut service = FakeService {
            log: log.clone(),
            delay: Arc::new(Mutex::new(Duration::from_secs(5))),
            lag: Arc::default(),
            wanted: Arc::default(),
            events: Arc::default(),
            preparing: false,
            down: Arc::default(),
        };
        change(&mut service);
        let ends = FakePods { log: log.clone(), ..FakePods::default() };
        for &(name, priority, grace, takes) in pods {
            let pod = ActivePod { uid: PodUid::new(name), name: name.to_owned(), priority, grace: Some(grace) };
            ends.pods.lock().unwrap().insert(name.to_owned(), (pod, Duration::from_secs(takes)));
        }
        let clock = Clock::virtual_from("2026-11-30T08:00:00Z".parse().unwrap());
        let file = MemoryFile(Arc::new(Mutex::new(Some(
            br#"{"startTime":"1970-01-01T00:00:07Z","endTime":"0001-01-01T00:00:00Z"}"#.to_vec(),
        ))));
        let (told, metrics, tasks) = (Arc::new(Told::default()), Arc::new(Metrics::new().unwrap()), Tasks::default());
        let ports = ShutdownPorts {
            service: Arc::new(service.clone()),
            pods: Arc::new(ends),
            state: Some(Arc::new(file.clone())),
            events: told.clone(),
            metrics: metrics.clone(),
            clock,
        };
        let periods = shutdown::periods(&[], Duration::from_secs(30), Duration::from_secs(10));
        let (reasons, not_ready) = watch::channel(Vec::new());
        start(periods, ports, reasons, &tasks);
        settle().await;
        Self { log, service, told, metrics, not_ready, file, tasks }
    }

    fn figure(&self, which: &str) -> String {
        let name = format!("kubelet_graceful_shutdown_{which}_time_seconds ");
        let text = self.metrics.encode().unwrap();
        text.lines().find_map(|l| l.strip_prefix(&name)).unwrap().to_owned()
    }

    fn stored(&self) -> String {
        String::from_utf8(self.file.0.lock().unwrap().clone().unwrap()).unwrap()
    }

    fn is_ready(&self) -> bool {
        self.not_ready.borrow().is_empty()
    }

    fn event(&self, start: bool) {
        self.service.events.lock().unwrap().last().unwrap().send(start).unwrap();
    }
}

const CRITICAL: i32 = 2_000_000_000;

#[tokio::test(start_paused = true)]
async fn pods_end_by_priority_and_the_lock_goes_last() {
    let pods = [("app", 0, 60, 3), ("quick", 5, 2, 1), ("hangs", 0, 60, 1000), ("dns", CRITICAL, 60, 4)];
    let w = World::new(&pods, |_| {}).await;
    assert_eq!(w.log.take(), ["delay 30", "locked"]);
    assert_eq!((w.figure("start"), w.figure("end")), ("7".into(), "0".into()));
    w.event(true);
    settle().await;
    assert_eq!(w.log.take(), ["refuse", "end app in 20", "end hangs in 20", "end quick in 2"]);
    assert_eq!(*w.not_ready.borrow(), ["node is shutting down"]);
    assert_eq!(w.told.take(), ["Shutdown"]);
    assert_eq!(w.stored(), r#"{"startTime":"2026-11-30T08:00:00.005Z","endTime":"0001-01-01T00:00:00Z"}"#);
    // Said once more: nothing changes.
    w.event(true);
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert_eq!(w.log.take(), ["quick ended", "app ended", "end dns in 10"]);
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(w.log.take(), ["dns ended", "released"]);
    assert!(w.stored().contains(r#""endTime":"2026-11-30T08:00:24.005Z""#), "{}", w.stored());
    assert_eq!(w.figure("end"), (w.figure("start").parse::<i64>().unwrap() + 24).to_string());
    assert!(!w.is_ready());
    // Called off after all: ready again, with a new lock.
    w.event(false);
    settle().await;
    assert_eq!(w.log.take(), ["accept", "locked"]);
    assert!(w.is_ready());
    assert_eq!(w.told.take(), ["Shutdown"]);
    w.tasks.drain(Duration::from_secs(1)).await;
    assert_eq!(w.log.take(), ["released"]);
}

#[tokio::test(start_paused = true)]
async fn called_off_under_way_the_others_stay() {
    let w = World::new(&[("app", 0, 60, 3), ("dns", CRITICAL, 60, 4)], |_| {}).await;
    w.event(true);
    settle().await;
    w.event(false);
    settle().await;
    assert_eq!(w.log.take(), ["delay 30", "locked", "refuse", "end app in 20", "accept", "locked", "released"]);
    assert!(w.is_ready());
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(w.log.take(), ["app ended"]);
    // The next one counts anew.
    w.event(true);
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(w.log.take(), ["refuse", "end app in 20", "app ended", "end dns in 10", "dns ended", "released"]);
}

#[tokio::test(start_paused = true)]
async fn a_service_that_comes_late_or_goes() {
    let w = World::new(&[("app", 0, 60, 3)], |s| s.down = Arc::new(AtomicUsize::new(2))).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(w.log.take(), ["no bus", "no bus", "delay 30", "locked"]);
    // It goes while the node shuts down, and comes back.
    w.event(true);
    settle().await;
    w.service.events.lock().unwrap().clear();
    settle().await;
    assert_eq!(w.log.take(), ["refuse", "end app in 20", "accept", "released"]);
    assert!(w.is_ready());
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(w.log.take(), ["locked", "app ended"]);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_that_was_under_way_is_not_missed() {
    let w = World::new(&[("app", 0, 60, 3)], |s| s.preparing = true).await;
    settle().await;
    assert_eq!(w.log.take(), ["delay 30", "locked", "refuse", "end app in 20"]);
}

#[tokio::test(start_paused = true)]
async fn a_service_that_does_not_wait_long_enough_is_not_relied_on() {
    let w = World::new(&[], |s| s.lag = Arc::new(AtomicUsize::new(4))).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(w.log.take(), ["delay 30", "locked"], "taken up after a moment");
    let w = World::new(&[], |s| s.lag = Arc::new(AtomicUsize::new(1000))).await;
    tokio::time::sleep(Duration::from_secs(20)).await;
    let log = w.log.take();
    assert!(log.len() > 1 && log.iter().all(|l| l == "delay 30"), "{log:?}");
}
