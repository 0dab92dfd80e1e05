//! Lines are compared with what klog 2.140 and component-base 0.36's JSON logger wrote for the same values.

use std::io;

use super::*;

#[derive(Clone, Default)]
struct Captured(Arc<Mutex<Vec<u8>>>);

impl Write for Captured {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Captured {
    fn take(&self) -> String {
        String::from_utf8(std::mem::take(&mut *self.0.lock().unwrap())).unwrap()
    }

    /// The lines without their headers.
    fn bodies(&self) -> Vec<String> {
        self.take().lines().map(|line| line.split_once("] ").map_or(line, |(_, body)| body).to_owned()).collect()
    }
}

fn fixed_clock() -> Clock {
    let now: Timestamp = "2026-11-29T19:16:53.123456789Z".parse().unwrap();
    Clock::new(move || now, TimeZone::fixed(jiff::tz::offset(1)))
}

fn logging(options: Options, events: impl FnOnce(&Handle)) -> Captured {
    let captured = Captured::default();
    let (layer, handle) = layer(options, Box::new(captured.clone()), fixed_clock());
    tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || events(&handle));
    captured
}

fn at(verbosity: i32) -> Options {
    Options { verbosity, ..Options::default() }
}

fn json() -> Options {
    Options { format: Format::Json, verbosity: 5, vmodule: Vec::new() }
}

#[derive(Debug, thiserror::Error)]
#[error("starting the container")]
struct Outer(#[source] io::Error);

#[test]
fn header_is_klogs() {
    let mut line = 0;
    let captured = logging(at(0), |_| {
        line = line!() + 1;
        tracing::warn!("here");
    });
    let expected = format!("W1129 20:16:53.123456 {:>7} tests.rs:{line}] \"here\"\n", std::process::id());
    assert_eq!(captured.take(), expected);
}

#[test]
fn fields_are_klogs() {
    let captured = logging(at(0), |_| {
        tracing::info!(
            key = "value", num = 3, b = true, f = 1.5,
            q = "a\"b\\c\td\x01é\u{200b}\u{2028}\u{1F600}\u{301}", list = ?["a", "b"], r#type = %"t", quoted = ?"x",
            "Message"
        );
        tracing::info!("two\nlines {}", 1);
        tracing::info!(a = 1, err = "e", "err in info");
        tracing::error!(pod = "ns/name", err = "it \"broke\"", "Failed");
    });
    assert_eq!(
        captured.bodies(),
        [
            concat!(
                r#""Message" key="value" num=3 b=true f=1.5 q="a\"b\\c\td\x01é\u200b\u2028"#,
                "\u{1F600}\u{301}",
                r#"" list=["a","b"] type="t" quoted="x""#
            ),
            r#""two\nlines 1""#,
            r#""err in info" a=1 err="e""#,
            r#""Failed" err="it \"broke\"" pod="ns/name""#,
        ]
    );
}

#[test]
fn text_of_several_lines_is_indented() {
    let captured = logging(at(0), |_| {
        tracing::error!(pod = "ns/name", err = "line 1\nline 2", "Failed");
        tracing::info!(m = "a\nb\n", k = "v", "x");
    });
    let text = captured.take();
    assert!(text.contains("] \"Failed\" err=<\n\tline 1\n\tline 2\n > pod=\"ns/name\"\n"), "{text}");
    assert!(text.ends_with("] \"x\" m=<\n\ta\n\tb\n > k=\"v\"\n"), "{text}");
}

#[test]
fn an_error_shows_its_chain() {
    let error = Outer(io::Error::other("no space left"));
    let captured = logging(at(0), |_| {
        tracing::error!(err = &error as &dyn std::error::Error, "Failed");
    });
    assert_eq!(captured.bodies(), [r#""Failed" err="starting the container: no space left""#]);
}

#[test]
fn span_fields_come_first_and_the_inner_one_counts() {
    let captured = logging(at(0), |_| {
        let outer = tracing::info_span!("worker", pod = "ns/a", k = "old", late = tracing::field::Empty).entered();
        outer.record("late", 7);
        tracing::info!(j = 1, k = "new", "changed");
        tracing::info!(j = 1, k = "old", "same");
    });
    assert_eq!(
        captured.bodies(),
        [r#""changed" pod="ns/a" late=7 j=1 k="new""#, r#""same" pod="ns/a" k="old" late=7 j=1"#]
    );
}

fn one_of_each() {
    tracing::error!(v = 9, "error");
    tracing::warn!("warn");
    tracing::info!("info");
    tracing::info!(v = 2, "info 2");
    tracing::debug!("debug");
    tracing::debug!(v = 5, "debug 5");
    tracing::trace!("trace");
    tracing::trace!(target: "h2::codec", "library");
}

#[test]
fn verbosity_chooses() {
    let all = ["error", "warn", "info", "info 2", "debug", "debug 5", "trace", "library"];
    for (verbosity, shown) in [(-1, 3), (0, 3), (1, 3), (2, 4), (3, 4), (4, 5), (5, 6), (6, 7), (9, 7), (10, 8)] {
        let captured = logging(at(verbosity), |_| one_of_each());
        let expected: Vec<String> = all[..shown].iter().map(|name| format!("{name:?}")).collect();
        assert_eq!(captured.bodies(), expected, "-v={verbosity}");
    }
}

#[test]
fn verbosity_and_vmodule_change_while_running() {
    let captured = logging(at(0), |handle| {
        let say = |text: &str| tracing::debug!(text, "x");
        say("quiet");
        handle.set_verbosity(4);
        assert_eq!(handle.verbosity(), 4);
        say("verbose");
        handle.set_verbosity(2);
        say("quiet again");
        handle.set_vmodule(VModule::parse_list("other=9,test*=4,tests=9").unwrap());
        say("this file");
        tracing::trace!("above its level");
        handle.set_vmodule(VModule::parse_list("other=9").unwrap());
        say("another file");
    });
    assert_eq!(captured.bodies(), [r#""x" text="verbose""#, r#""x" text="this file""#]);
}

#[test]
fn json_is_component_bases() {
    let mut line = 0;
    let captured = logging(json(), |_| {
        line = line!() + 1;
        tracing::warn!("careful");
        tracing::info!(key = "value", num = 3, f = 1.5, big = u64::MAX, "msg \"q\" <&>\u{2028} \x01");
        tracing::debug!(b = true, list = ?["a"], "deb");
        tracing::error!(err = "boom", pod = "ns/p", "failed");
    });
    let text = captured.take();
    let head = format!("{{\"ts\":1795979813123.4568,\"caller\":\"klog/tests.rs:{line}\",");
    assert!(text.starts_with(&head), "{text}");
    let bodies: Vec<&str> = text
        .lines()
        .map(|line| {
            serde_json::from_str::<serde_json::Value>(line).unwrap();
            line.split_once("\"msg\":").unwrap().1
        })
        .collect();
    assert_eq!(
        bodies,
        [
            r#""careful","v":0}"#,
            concat!(
                "\"msg \\\"q\\\" <&>\u{2028} \\u0001\",\"v\":0,",
                r#""key":"value","num":3,"f":1.5,"big":18446744073709551615}"#
            ),
            r#""deb","v":4,"b":true,"list":["a"]}"#,
            r#""failed","pod":"ns/p","err":"boom"}"#,
        ]
    );
}

#[test]
fn callers_are_directory_and_file() {
    for (path, short) in [
        ("crates/pod/src/worker.rs", "pod/worker.rs"),
        ("crates/pod/src/volumes/mod.rs", "volumes/mod.rs"),
        ("src/main.rs", "main.rs"),
        ("main.rs", "main.rs"),
    ] {
        assert_eq!(short_path(path), short);
    }
}

/// Each line goes out in one write, so that lines of several processes on one pipe do not mix.
#[test]
fn one_write_a_line() {
    struct Count(Arc<AtomicI32>);
    impl Write for Count {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            assert_eq!(bytes.last(), Some(&b'\n'));
            self.0.fetch_add(1, Ordering::Relaxed);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let count = Arc::new(AtomicI32::new(0));
    let (layer, _) = layer(at(0), Box::new(Count(count.clone())), fixed_clock());
    tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
        for i in 0..3 {
            tracing::info!(i, text = "a\nb", "line");
        }
    });
    assert_eq!(count.load(Ordering::Relaxed), 3);
}

/// A reader that stops reading shows up as a blocked write.
#[test]
fn a_blocked_write_is_seen() {
    use std::sync::mpsc;
    struct Blocking {
        entered: mpsc::Sender<()>,
        go: mpsc::Receiver<()>,
    }
    impl Write for Blocking {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.entered.send(()).unwrap();
            self.go.recv().unwrap();
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let (entered, is_entered) = mpsc::channel();
    let (let_go, go) = mpsc::channel();
    let (layer, handle) = layer(at(0), Box::new(Blocking { entered, go }), fixed_clock());
    assert_eq!(handle.blocked_for(), Duration::ZERO);
    let writer = std::thread::spawn(move || {
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || tracing::info!("stuck"));
    });
    is_entered.recv().unwrap();
    while handle.blocked_for() == Duration::ZERO {
        std::thread::yield_now();
    }
    let_go.send(()).unwrap();
    writer.join().unwrap();
    assert_eq!(handle.blocked_for(), Duration::ZERO);
}
