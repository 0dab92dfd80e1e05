//! What kubectl does in containers through the API server: commands, copies, forwarded ports, terminals, debugging containers.

use std::io::{Read, Write};
use std::process::{Output, Stdio};

use e2e::cluster::Cluster;
use e2e::{container, pod, seconds, wait_until, with};
use serde_json::json;

use crate::SLEEP;
use crate::streams::{full, text};

/// Runs kubectl with something to read.
fn fed(cluster: &Cluster, arguments: &[&str], input: &[u8], websockets: bool) -> Output {
    let mut command = cluster.plane.kubectl_command();
    command.args(arguments).env("KUBECTL_REMOTE_COMMAND_WEBSOCKETS", websockets.to_string());
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            // Fails when the other side ends first, which the output then shows.
            let _ = stdin.write_all(input);
        });
        child.wait_with_output().unwrap()
    })
}

pub(crate) fn sessions_carry_everything(cluster: &mut Cluster) {
    let web = with(container("web", "exec httpd -f -p 8080 -h /bin"), json!({"ports": [{"containerPort": 8080}]}));
    cluster.run(&pod("talks", [container("c", SLEEP), web]));
    cluster.wait_running("talks");
    let size = if full() { 100_000_000_u32 } else { 20_000_000 };
    let big: Vec<u8> = (0..size).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    for websockets in [true, false] {
        let exec = ["exec", "-i", "talks", "-c", "c", "--"];
        let through = fed(cluster, &[&exec[..], &["cat"]].concat(), &big, websockets);
        assert!(through.stdout == big, "{} bytes came back: {}", through.stdout.len(), text(&through.stderr));
        for code in [0, 1, 137] {
            let ended =
                fed(cluster, &[&exec[..], &["sh", "-c", &format!("cat; exit {code}")]].concat(), b"in", websockets);
            assert_eq!(
                (ended.status.code(), text(&ended.stdout).as_str()),
                (Some(code), "in"),
                "{}",
                text(&ended.stderr)
            );
        }
    }
    // Both ways in one tar stream each.
    let file = cluster.node.dir().join("copied");
    std::fs::write(&file, &big[..1_000_000]).unwrap();
    let (there, back) = (file.display().to_string(), cluster.node.dir().join("back").display().to_string());
    for arguments in [["cp", &there, "talks:/tmp/copied", "-c", "c"], ["cp", "talks:/tmp/copied", &back, "-c", "c"]] {
        let copied = cluster.kubectl(&arguments);
        assert!(copied.status.success(), "{}", text(&copied.stderr));
    }
    assert!(std::fs::read(&back).unwrap() == big[..1_000_000]);

    let [port] = rig::free_ports().unwrap();
    let mut forward = cluster.plane.kubectl_command();
    forward.args(["port-forward", "talks", &format!("{port}:8080")]).stdout(Stdio::null()).stderr(Stdio::null());
    let mut forward = forward.spawn().unwrap();
    let get = || rig::http::get_tcp(port, "/busybox").ok().filter(|(code, _)| *code == 200);
    wait_until("the port is forwarded", seconds(20), get);
    let all = std::thread::scope(|scope| {
        let asked: Vec<_> = (0..50).map(|_| scope.spawn(get)).collect();
        asked.into_iter().map(|a| a.join().unwrap().map_or(0, |(_, body)| body.len())).collect::<Vec<_>>()
    });
    forward.kill().unwrap();
    forward.wait().unwrap();
    assert!(all[0] > 0 && all.iter().all(|n| *n == all[0]), "{all:?}");
}

/// A35: input ends, output is whole however slowly it is taken, the right container is meant, and a session ends with its container.
pub(crate) fn sessions_end_as_they_should(cluster: &mut Cluster) {
    let named = |name: &str| container(name, &format!("echo {name} > /tmp/me; {SLEEP}"));
    cluster.run(&pod("two", [named("a"), named("ab")]));
    let mut waits =
        pod("waits", [with(container("c", SLEEP), json!({"image": "lab.test/no-such:1", "imagePullPolicy": "Never"}))]);
    waits["spec"]["restartPolicy"] = json!("Never");
    cluster.run(&waits);
    cluster.wait_running("two");
    wait_until("both have begun", seconds(30), || {
        let both =
            ["a", "ab"].map(|c| text(&cluster.kubectl(&["exec", "two", "-c", c, "--", "cat", "/tmp/me"]).stdout));
        (both == ["a\n", "ab\n"]).then_some(())
    });
    assert_eq!(text(&cluster.kubectl(&["exec", "two", "--", "cat", "/tmp/me"]).stdout), "a\n", "the first is meant");
    for (target, container, why) in [("two", "b", "container b"), ("waits", "c", "container not found")] {
        let refused = cluster.kubectl(&["exec", target, "-c", container, "--", "true"]);
        assert!(!refused.status.success() && text(&refused.stderr).contains(why), "{refused:?}");
    }

    let times = if full() { 100 } else { 20 };
    for websockets in [true, false] {
        std::thread::scope(|scope| {
            let cluster = &*cluster;
            let echo = move || fed(cluster, &["exec", "-i", "two", "--", "cat"], b"x\n", websockets);
            let all: Vec<_> =
                (0..4).map(|_| scope.spawn(move || (0..times / 4).map(|_| echo()).collect::<Vec<_>>())).collect();
            for out in all.into_iter().flat_map(|t| t.join().unwrap()) {
                assert_eq!((out.status.code(), text(&out.stdout).as_str()), (Some(0), "x\n"), "{}", text(&out.stderr));
            }
        });
    }

    // Nothing to read from, a burst of output, and one who takes it slowly.
    let last = if full() { 2_000_000 } else { 200_000 };
    let mut command = cluster.plane.kubectl_command();
    command.args(["exec", "two", "--", "seq", "1", &last.to_string()]).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut output = child.stdout.take().unwrap();
    let (mut all, mut piece) = (Vec::new(), vec![0; 16 << 10]);
    loop {
        let n = output.read(&mut piece).unwrap();
        all.extend_from_slice(&piece[..n]);
        if n == 0 {
            break;
        }
        if all.len() < 1 << 20 {
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }
    assert!(child.wait().unwrap().success());
    let expected: String = (1..=last).map(|n| format!("{n}\n")).collect();
    assert!(all == expected.as_bytes(), "{} bytes of {}", all.len(), expected.len());

    // The container ends under a session that would wait for ever.
    let mut command = cluster.plane.kubectl_command();
    command.args(["exec", "-i", "two", "-c", "ab", "--", "sh", "-c", "echo here; cat"]);
    let mut session = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut here = [0; 5];
    session.stdout.as_mut().unwrap().read_exact(&mut here).unwrap();
    cluster.kubectl(&["exec", "two", "-c", "ab", "--", "sh", "-c", "kill 1"]);
    let ended = wait_until("the session ends", seconds(30), || session.try_wait().unwrap());
    assert!(!ended.success(), "{ended}");
}

/// Each on connections of its own, all at the same time.
pub(crate) fn many_at_once(cluster: &mut Cluster) {
    cluster.run(&pod("busy", [container("c", SLEEP)]));
    cluster.wait_running("busy");
    let many = if full() { 100 } else { 12 };
    let said = std::thread::scope(|scope| {
        let cluster = &*cluster;
        let all: Vec<_> = (0..many)
            .map(|n| {
                scope.spawn(move || cluster.kubectl(&["exec", "busy", "--", "sh", "-c", &format!("sleep 3; echo {n}")]))
            })
            .collect();
        all.into_iter().map(|s| s.join().unwrap()).collect::<Vec<_>>()
    });
    for (n, out) in said.iter().enumerate() {
        assert_eq!(text(&out.stdout), format!("{n}\n"), "{}", text(&out.stderr));
    }
}

pub(crate) fn a_terminal_follows_its_window(cluster: &mut Cluster) {
    cluster.run(&pod("term", [with(container("c", "exec sh"), json!({"stdin": true, "tty": true}))]));
    cluster.wait_running("term");
    let kubectl = cluster.plane.kubectl_command();
    // script(1) gives kubectl a terminal, whose size then changes; what is typed comes by its standard input.
    let attach = format!("{} attach -it term", kubectl.get_program().display());
    let on_terminal = format!("stty rows 30 cols 80; (sleep 4; stty rows 44 cols 132 </dev/tty) & {attach}");
    let typed = "sleep 2; echo stty size; sleep 4; echo stty size; echo exit; sleep 1";
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", &format!("({typed}) | script -qec \"$0\" /dev/null"), &on_terminal]);
    for (name, value) in kubectl.get_envs() {
        shell.env(name, value.unwrap_or_default());
    }
    let out = shell.output().unwrap();
    let screen = text(&out.stdout);
    let sizes: Vec<&str> = screen.lines().map(str::trim).filter(|l| ["30 80", "44 132"].contains(l)).collect();
    assert_eq!(sizes, ["30 80", "44 132"], "{screen}{}", text(&out.stderr));
}

pub(crate) fn a_debugging_container(cluster: &mut Cluster) {
    cluster.run(&pod("ill", [container("c", SLEEP)]));
    cluster.wait_running("ill");
    let image = container("x", "")["image"].as_str().unwrap().to_owned();
    let debug = ["debug", "ill", "--container=doctor", "--image", &image, "--attach=false", "--", "sh", "-c"];
    let made = cluster.kubectl(&[&debug[..], &["echo here I am; sleep 1000"]].concat());
    assert!(made.status.success(), "{}", text(&made.stderr));
    let logs = || Some(text(&cluster.kubectl(&["logs", "ill", "-c", "doctor"]).stdout)).filter(|t| t == "here I am\n");
    wait_until("the debugging container speaks", seconds(30), logs);
    let out = cluster.kubectl(&["exec", "ill", "-c", "doctor", "--", "hostname"]);
    assert_eq!(text(&out.stdout), "ill\n", "{}", text(&out.stderr));
}
