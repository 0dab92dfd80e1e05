//! Logs that grow, rotate and end while they are followed.

use std::io::Write;

use super::*;

struct Logged {
    running: Running,
    path: PathBuf,
}

impl Logged {
    async fn start() -> Self {
        let statuses = json!({"containerStatuses": [running("app", "c1")]});
        let pods = FakePods(HashMap::from([("web", pod("web", &[("app", false)], statuses))]));
        let running = Running::start(pods, |_, _| {}).await;
        let directory = running.directory.path().join("app");
        std::fs::create_dir(&directory).unwrap();
        let path = put_log(&directory, "0.log", &[("stdout", "begin".into())]);
        let logged = Self { running, path };
        logged.runs(true);
        logged
    }

    fn runs(&self, running: bool) {
        let log = ContainerLog { path: self.path.clone(), running };
        self.running.containers.logs.lock().unwrap().insert("c1".into(), log);
    }

    fn writer(&self) -> std::fs::File {
        std::fs::OpenOptions::new().append(true).create(true).open(&self.path).unwrap()
    }

    async fn follow(&self, query: &str) -> Following {
        let mut stream = self.running.connect(client(None)).await.unwrap();
        let request = format!(
            "GET /containerLogs/default/web/app?follow=true{query} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut following = Following { stream, text: String::new() };
        following.until("\r\n\r\n").await;
        following
    }
}

struct Following {
    stream: TlsStream<TcpStream>,
    text: String,
}

fn line(text: &str) -> String {
    format!("2026-11-29T01:02:04Z stdout F {text}\n")
}

impl Following {
    /// Reads until the text is there, or the end.
    async fn until(&mut self, wanted: &str) -> bool {
        let mut buffer = vec![0; 64 << 10];
        let mut from = 0;
        let read = async {
            while !self.text.as_bytes()[from..].windows(wanted.len()).any(|w| w == wanted.as_bytes()) {
                from = self.text.len().saturating_sub(wanted.len());
                match self.stream.read(&mut buffer).await {
                    Ok(0) | Err(_) => return false,
                    Ok(n) => self.text += std::str::from_utf8(&buffer[..n]).unwrap(),
                }
            }
            true
        };
        tokio::time::timeout(Duration::from_secs(20), read).await.expect("nothing comes")
    }

    /// All lines of output, when the body has ended.
    async fn lines(mut self) -> Vec<String> {
        assert!(self.until("\r\n0\r\n\r\n").await, "the body has an end: {}", self.text);
        let body = self.text.split_once("\r\n\r\n").unwrap().1;
        body.split("\r\n").skip(1).step_by(2).collect::<String>().lines().map(str::to_owned).collect()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lines_come_as_they_are_written_and_the_end_with_the_container() {
    let logged = Logged::start().await;
    let mut follower = logged.follow("").await;
    assert!(follower.until("begin").await);
    let mut writer = logged.writer();
    for text in ["one", "two"] {
        writer.write_all(line(text).as_bytes()).unwrap();
        assert!(follower.until(text).await);
    }
    // A line in two writes.
    writer.write_all(b"2026-11-29T01:02:04Z stdout F thr").unwrap();
    writer.write_all(b"ee\n").unwrap();
    // The runtime closes the log, and says a little later that the container has ended.
    drop(writer);
    tokio::time::sleep(Duration::from_millis(20)).await;
    logged.runs(false);
    assert_eq!(follower.lines().await, ["begin", "one", "two", "three"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_that_has_ended_is_not_waited_for() {
    let logged = Logged::start().await;
    logged.runs(false);
    assert_eq!(logged.follow("").await.lines().await, ["begin"]);
    assert_eq!(logged.follow("&limitBytes=3").await.lines().await, ["beg"]);
    assert!(logged.follow("&tailLines=0").await.lines().await.is_empty());
}

/// As containerd does it: the new file is there before the last lines are in the old one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_line_is_lost_or_doubled_over_rotations() {
    let logged = Logged::start().await;
    let (all, late) = (logged.follow("").await, logged.follow("&tailLines=0").await);
    let mut writer = logged.writer();
    let mut number = 0;
    let mut write = |writer: &mut std::fs::File, count: usize| {
        for _ in 0..count {
            writer.write_all(line(&format!("n{number}")).as_bytes()).unwrap();
            number += 1;
        }
    };
    for round in 0..6_u32 {
        write(&mut writer, 500);
        let rotated = logged.path.with_extension(format!("log.{round}"));
        std::fs::rename(&logged.path, &rotated).unwrap();
        write(&mut writer, 3);
        let mut new = logged.writer();
        write(&mut writer, 2);
        // Kubelets compress the file before this one; that closes a file that is not written to.
        if round > 0 {
            drop(std::fs::File::open(logged.path.with_extension(format!("log.{}", round - 1))).unwrap());
        }
        drop(std::mem::replace(&mut writer, new.try_clone().unwrap()));
        write(&mut new, 1);
        drop(new);
        // So soon after each other that a follower is one or more behind.
        tokio::time::sleep(Duration::from_millis(u64::from(round % 2) * 30)).await;
    }
    logged.runs(false);
    drop(writer);
    let expected: Vec<String> = (0..number).map(|n| format!("n{n}")).collect();
    let given = late.lines().await;
    let first = given.iter().zip(&expected).position(|(g, e)| g != e);
    assert!(given == expected, "{} lines, the first other one is {first:?}", given.len());
    let lines = all.lines().await;
    assert!(lines[0] == "begin" && lines[1..] == expected, "{} lines", lines.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_that_goes_leaves_nothing_and_a_server_that_stops_ends_all() {
    let logged = Logged::start().await;
    let inotify = || {
        std::fs::read_dir("/proc/self/fd")
            .unwrap()
            .filter(|f| {
                let target = f.as_ref().ok().and_then(|f| std::fs::read_link(f.path()).ok());
                target.is_some_and(|t| t == logged.path)
            })
            .count()
    };
    for _ in 0..3 {
        let mut followers = Vec::new();
        for _ in 0..10 {
            let mut follower = logged.follow("").await;
            assert!(follower.until("begin").await);
            followers.push(follower);
        }
        assert_eq!(inotify(), 10);
        drop(followers);
        let gone = async {
            while inotify() > 0 {
                tokio::time::sleep(Duration::from_millis(5)).await
            }
        };
        tokio::time::timeout(Duration::from_secs(10), gone).await.expect("the logs stay open");
    }
    let mut follower = logged.follow("").await;
    assert!(follower.until("begin").await);
    logged.running.stop.cancel();
    assert_eq!(follower.lines().await, ["begin"]);
    assert_eq!(logged.running.task.await.unwrap().drain(Duration::from_secs(5)).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_reader_gets_everything_and_costs_nothing() {
    let logged = Logged::start().await;
    let lines: Vec<_> = (0..60_000).map(|i| ("stdout", format!("{i} {}", "x".repeat(200)))).collect();
    put_log(logged.path.parent().unwrap(), "0.log", &lines);
    logged.runs(false);
    let mut follower = logged.follow("").await;
    let offset = || {
        let fds = std::fs::read_dir("/proc/self/fd").unwrap();
        let of_log = fds
            .filter_map(|f| f.ok().map(|f| f.path()))
            .find(|f| std::fs::read_link(f).is_ok_and(|t| t == logged.path));
        let info = std::fs::read_to_string(of_log.unwrap().to_str().unwrap().replace("/fd/", "/fdinfo/")).unwrap();
        info.lines().next().unwrap().split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
    };
    // Nothing is taken: when the kernel's buffers are full, the server reads no further.
    let mut before = 0;
    let rest = async {
        loop {
            tokio::time::sleep(Duration::from_millis(200)).await;
            match offset() {
                now if now == before && now > 0 => return now,
                now => before = now,
            }
        }
    };
    let reached = tokio::time::timeout(Duration::from_secs(20), rest).await.expect("it reads on and on");
    let size = std::fs::metadata(&logged.path).unwrap().len();
    assert!(reached < size * 3 / 4, "{reached} of {size}");
    assert!(follower.until("59999 ").await);
    assert_eq!(follower.lines().await.len(), 60_000);
}
