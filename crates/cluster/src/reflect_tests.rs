//! The reflector against a scripted collection, under a paused clock.

use std::collections::VecDeque;
use std::sync::Mutex;

use k8s_openapi::api::core::v1::Pod;

use super::*;

type Script = Vec<ClusterResult<WatchEvent<Pod>>>;

/// What happens after a script's events: the server closes the watch, or nothing more comes.
#[derive(Clone, Copy, PartialEq)]
enum Then {
    Close,
    Hang,
}

#[derive(Default)]
struct Fake {
    lists: Mutex<VecDeque<ClusterResult<Page<Pod>>>>,
    watches: Mutex<VecDeque<ClusterResult<(Script, Then)>>>,
    asked: Mutex<Vec<String>>,
}

#[async_trait]
impl Collection<Pod> for Fake {
    async fn list(&self, _: &Scope, ask: &ListAsk) -> ClusterResult<Page<Pod>> {
        let next = ask.next.clone().unwrap_or_default();
        self.asked.lock().unwrap().push(format!("list {:?} {} {next}", ask.resource_version, ask.limit));
        self.lists.lock().unwrap().pop_front().unwrap_or_else(|| Err(error(ErrorKind::Unreachable)))
    }

    async fn watch(&self, _: &Scope, ask: &WatchAsk) -> ClusterResult<WatchStream<Pod>> {
        assert!(ask.timeout >= WATCH_TIME && ask.timeout < WATCH_TIME * 2);
        let how = if ask.initial_events { "stream" } else { "watch" };
        self.asked.lock().unwrap().push(format!("{how} {:?}", ask.resource_version));
        let next = self.watches.lock().unwrap().pop_front();
        let (events, then) = next.unwrap_or_else(|| Err(error(ErrorKind::Unreachable)))?;
        let events = futures::stream::iter(events);
        Ok(match then {
            Then::Close => events.boxed(),
            Then::Hang => events.chain(futures::stream::pending()).boxed(),
        })
    }

    async fn get(&self, _: Option<&str>, _: &str, _: bool) -> ClusterResult<Pod> {
        Err(error(ErrorKind::NotFound))
    }
}

fn error(kind: ErrorKind) -> ClusterError {
    ClusterError::new("fake", kind, format!("{kind:?}"))
}

fn pod(name: &str, version: u32) -> Pod {
    let mut pod = Pod::default();
    pod.metadata.name = Some(name.to_owned());
    pod.metadata.resource_version = Some(version.to_string());
    pod
}

fn page(items: Vec<Pod>, version: &str, next: Option<&str>) -> ClusterResult<Page<Pod>> {
    Ok(Page { items, resource_version: version.to_owned(), next: next.map(str::to_owned) })
}

fn up(name: &str, version: u32) -> ClusterResult<WatchEvent<Pod>> {
    Ok(WatchEvent::Upsert(pod(name, version)))
}

fn mark(version: &str, end: bool) -> ClusterResult<WatchEvent<Pod>> {
    Ok(WatchEvent::Bookmark { resource_version: version.to_owned(), initial_events_end: end })
}

struct Run {
    deltas: mpsc::Receiver<Delta<Pod>>,
    status: watch::Receiver<ReflectorStatus>,
    fake: Arc<Fake>,
    _stop: tokio_util::sync::DropGuard,
}

fn run(lists: Vec<ClusterResult<Page<Pod>>>, watches: Vec<ClusterResult<(Script, Then)>>, streaming: bool) -> Run {
    let fake =
        Arc::new(Fake { lists: Mutex::new(lists.into()), watches: Mutex::new(watches.into()), ..Fake::default() });
    let (mut reflector, deltas, status) = Reflector::new(fake.clone(), Scope::pods_of_node("n"), 4, Arc::new(|| 0.25));
    if !streaming {
        reflector = reflector.without_streaming();
    }
    let stop = CancellationToken::new();
    tokio::spawn(reflector.run(stop.clone()));
    Run { deltas, status, fake, _stop: stop.drop_guard() }
}

impl Run {
    async fn next(&mut self) -> String {
        let names = |pods: Vec<Pod>| {
            let mut names: Vec<String> = pods.into_iter().map(|p| p.metadata.name.unwrap()).collect();
            names.sort();
            names.join(",")
        };
        match tokio::time::timeout(Duration::from_secs(3600), self.deltas.recv()).await.unwrap().unwrap() {
            Delta::Snapshot(pods) => format!("= {}", names(pods)),
            Delta::Upsert(p) => format!("+ {}@{}", p.metadata.name.unwrap(), p.metadata.resource_version.unwrap()),
            Delta::Remove(key) => format!("- {}", key.name),
        }
    }

    async fn asked(&self, count: usize) -> Vec<String> {
        for _ in 0..10_000 {
            if self.fake.asked.lock().unwrap().len() >= count {
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        self.fake.asked.lock().unwrap()[..count].to_vec()
    }
}

#[tokio::test(start_paused = true)]
async fn a_streamed_list_goes_on_as_a_watch_and_is_resumed_where_it_left_off() {
    let mut r = run(
        vec![],
        vec![
            Ok((
                vec![
                    up("a", 1),
                    up("b", 2),
                    up("a", 3),
                    Ok(WatchEvent::Delete(pod("b", 4))),
                    mark("5", true),
                    up("c", 6),
                    Ok(WatchEvent::Delete(pod("a", 7))),
                    mark("9", false),
                ],
                Then::Close,
            )),
            Ok((vec![up("d", 11)], Then::Hang)),
        ],
        true,
    );
    assert_eq!(r.next().await, "= a");
    assert_eq!(r.next().await, "+ c@6");
    assert_eq!(r.next().await, "- a");
    assert_eq!(r.next().await, "+ d@11");
    assert_eq!(r.asked(2).await, ["stream \"\"", "watch \"9\""]);
    assert_eq!(*r.status.borrow(), ReflectorStatus { synced: true, watching: true, error: None });
}

#[tokio::test(start_paused = true)]
async fn a_server_without_streamed_lists_is_listed_page_by_page() {
    let mut r = run(
        vec![page(vec![pod("a", 1)], "5", Some("t1")), page(vec![pod("b", 2)], "6", None)],
        vec![Err(error(ErrorKind::Invalid)), Ok((vec![up("c", 8)], Then::Hang))],
        true,
    );
    assert_eq!(r.next().await, "= a,b");
    assert_eq!(r.next().await, "+ c@8");
    assert_eq!(r.asked(4).await, ["stream \"\"", "list \"0\" 500 ", "list \"0\" 500 t1", "watch \"5\""]);
}

#[tokio::test(start_paused = true)]
async fn a_streamed_list_that_never_ends_is_given_up() {
    let mut r = run(
        vec![page(vec![pod("a", 1)], "5", None)],
        vec![Ok((vec![up("a", 1)], Then::Hang)), Ok((vec![], Then::Hang))],
        true,
    );
    let start = Instant::now();
    assert_eq!(r.next().await, "= a");
    assert_eq!(start.elapsed(), STREAMED_LIST);
    assert_eq!(r.asked(3).await, ["stream \"\"", "list \"0\" 500 ", "watch \"5\""]);
}

#[tokio::test(start_paused = true)]
async fn gone_takes_a_new_picture_of_the_newest() {
    let gone = || Err(error(ErrorKind::Gone));
    let mut r = run(
        vec![page(vec![pod("a", 1)], "5", None), page(vec![pod("b", 9)], "9", None)],
        vec![Ok((vec![up("a", 6), gone()], Then::Hang)), Ok((vec![], Then::Hang))],
        false,
    );
    assert_eq!(r.next().await, "= a");
    assert_eq!(r.next().await, "+ a@6");
    assert_eq!(r.next().await, "= b");
    assert_eq!(r.asked(4).await, ["list \"0\" 500 ", "watch \"5\"", "list \"\" 500 ", "watch \"9\""]);
}

#[tokio::test(start_paused = true)]
async fn a_broken_watch_takes_a_new_picture_that_is_not_older() {
    let mut r = run(
        vec![page(vec![], "5", None), page(vec![pod("b", 9)], "9", None)],
        vec![Ok((vec![up("a", 6), Err(error(ErrorKind::Timeout))], Then::Hang)), Ok((vec![], Then::Hang))],
        false,
    );
    assert_eq!(r.next().await, "= ");
    assert_eq!(r.next().await, "+ a@6");
    assert_eq!(r.next().await, "= b");
    assert_eq!(r.asked(4).await[2], "list \"6\" 0 ");
}

#[tokio::test(start_paused = true)]
async fn an_absent_server_is_asked_ever_more_rarely_and_costs_no_new_picture() {
    let mut watches: Vec<ClusterResult<(Script, Then)>> = (0..6).map(|_| Err(error(ErrorKind::Unreachable))).collect();
    watches.push(Ok((vec![up("a", 6)], Then::Hang)));
    let mut r = run(vec![page(vec![], "5", None)], watches, false);
    assert_eq!(r.next().await, "= ");
    let start = Instant::now();
    assert_eq!(r.next().await, "+ a@6");
    // 0.8 + 1.6 + … + 25.6 = 50.4 s, each 1.25 times as long with this jitter.
    assert_eq!(start.elapsed().as_secs(), 63);
    assert!(r.asked(8).await[1..].iter().all(|a| a == "watch \"5\""));
    assert_eq!(r.status.borrow().error, None);
}

#[tokio::test(start_paused = true)]
async fn retry_after_of_a_throttled_watch_is_honoured() {
    let busy = || Err(error(ErrorKind::Throttled { retry_after: Some(Duration::from_secs(77)) }));
    let mut r = run(
        vec![page(vec![], "5", None)],
        vec![Ok((vec![busy()], Then::Hang)), Ok((vec![up("a", 6)], Then::Hang))],
        false,
    );
    assert_eq!(r.next().await, "= ");
    let start = Instant::now();
    assert_eq!(r.next().await, "+ a@6");
    assert_eq!(start.elapsed().as_secs(), 77);
    assert_eq!(r.asked(3).await[2], "watch \"5\"");
}

#[tokio::test(start_paused = true)]
async fn watches_that_end_at_once_are_no_storm() {
    let watches = (0..40).map(|_| Ok((vec![], Then::Close))).collect();
    let mut r = run(vec![page(vec![], "5", None)], watches, false);
    assert_eq!(r.next().await, "= ");
    tokio::time::sleep(Duration::from_secs(120)).await;
    let count = r.fake.asked.lock().unwrap().len();
    assert!(count < 12, "{count} requests in two minutes");
}

#[tokio::test(start_paused = true)]
async fn a_first_list_that_expires_midway_starts_over_from_the_newest() {
    let mut r = run(
        vec![page(vec![pod("a", 1)], "5", Some("t")), Err(error(ErrorKind::Gone)), page(vec![pod("c", 7)], "7", None)],
        vec![Ok((vec![], Then::Hang))],
        false,
    );
    assert_eq!(r.next().await, "= c");
    assert_eq!(r.asked(3).await, ["list \"0\" 500 ", "list \"0\" 500 t", "list \"\" 500 "]);
}

#[tokio::test(start_paused = true)]
async fn ends_when_nobody_listens() {
    let fake = Arc::new(Fake::default());
    let (reflector, deltas, _status) = Reflector::<Pod>::new(fake, Scope::all(), 1, Arc::new(|| 0.0));
    drop(deltas);
    tokio::time::timeout(Duration::from_secs(60), reflector.run(CancellationToken::new())).await.unwrap();
}
