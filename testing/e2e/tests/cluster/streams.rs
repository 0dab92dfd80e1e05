//! What kubectl has of the kubelet's port through the API server: logs, sessions, forwarded ports; and who may use the port.

use std::io::Write;
use std::process::{Output, Stdio};

use e2e::cluster::Cluster;
use e2e::{container, pod, seconds, wait_until, with};
use serde_json::{Value, json};

use crate::SLEEP;

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

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

pub(crate) fn a_log_is_followed_over_rotations(cluster: &mut Cluster) {
    const LINES: usize = 12_000;
    let usual: Vec<(&str, Value)> = ["containerLogMaxSize", "containerLogMonitorInterval"]
        .map(|key| (key, cluster.node.config()[key].clone()))
        .to_vec();
    cluster.node.configure("containerLogMaxSize", json!("20Ki"));
    cluster.node.configure("containerLogMonitorInterval", json!("3s"));
    cluster.node.restart();
    cluster.wait_ready();
    let print = format!(
        "i=0; while [ $i -lt {LINES} ]; do echo n$i; i=$((i+1)); [ $((i%200)) = 0 ] && sleep 0.3; done; sleep 1"
    );
    let mut manifest = pod("lines", [container("c", &print)]);
    manifest["spec"]["restartPolicy"] = json!("Never");
    cluster.run(&manifest);
    let running = cluster.wait_running("lines");
    let followed = cluster.kubectl(&["logs", "-f", "lines"]);
    let expected: Vec<String> = (0..LINES).map(|n| format!("n{n}")).collect();
    let given = text(&followed.stdout);
    let given: Vec<&str> = given.lines().collect();
    let first = given.iter().zip(&expected).position(|(g, e)| g != e);
    assert!(given == expected, "{} lines, the first other one is {first:?}", given.len());
    let uid = running["metadata"]["uid"].as_str().unwrap();
    let rotated = std::fs::read_dir(cluster.node.logs().join(format!("default_lines_{uid}/c"))).unwrap();
    assert!(rotated.count() > 1, "the log was not rotated");
    for (key, value) in usual {
        cluster.node.configure(key, value);
    }
    cluster.node.restart();
    cluster.wait_ready();
}

pub(crate) fn sessions_carry_everything(cluster: &mut Cluster) {
    let web = with(container("web", "exec httpd -f -p 8080 -h /bin"), json!({"ports": [{"containerPort": 8080}]}));
    cluster.run(&pod("talks", [container("c", SLEEP), web]));
    cluster.wait_running("talks");
    let big: Vec<u8> = (0..20_000_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
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
        let asked: Vec<_> = (0..20).map(|_| scope.spawn(get)).collect();
        asked.into_iter().map(|a| a.join().unwrap().map_or(0, |(_, body)| body.len())).collect::<Vec<_>>()
    });
    forward.kill().unwrap();
    forward.wait().unwrap();
    assert!(all[0] > 0 && all.iter().all(|n| *n == all[0]), "{all:?}");
}

pub(crate) fn the_port_is_for_those_who_may(cluster: &mut Cluster) {
    cluster.run(&pod("shown", [container("c", SLEEP)]));
    cluster.wait_running("shown");
    let node = cluster.get_node();
    let address = node["status"]["addresses"].as_array().unwrap().iter().find(|a| a["type"] == "InternalIP").unwrap();
    let server = format!("--server=https://{}:{}", address["address"].as_str().unwrap(), cluster.node.port("port"));
    let token = text(&cluster.kubectl(&["create", "token", "default"]).stdout);
    let ask = |token: &str, path: &str| {
        let token = format!("--token={}", token.trim());
        let mut command = cluster.plane.kubectl_command();
        command.env("KUBECONFIG", "/dev/null").args([
            "--insecure-skip-tls-verify",
            &server,
            &token,
            "get",
            "--raw",
            path,
        ]);
        let out = command.output().unwrap();
        (out.status.success(), text(&out.stdout) + &text(&out.stderr))
    };
    let (ok, why) = ask("made-up", "/pods");
    assert!(!ok && why.contains("must be logged in"), "{why}");
    let forbidden =
        "Forbidden (user=system:serviceaccount:default:default, verb=get, resource=nodes, subresource(s)=[pods proxy])";
    let (ok, why) = ask(&token, "/pods");
    assert!(!ok && why.contains(forbidden), "{why}");
    for arguments in [
        &["create", "clusterrole", "shows-pods", "--verb=get", "--resource=nodes/pods"][..],
        &["create", "clusterrolebinding", "shows-pods", "--clusterrole=shows-pods", "--serviceaccount=default:default"],
    ] {
        let made = cluster.kubectl(arguments);
        assert!(made.status.success(), "{}", text(&made.stderr));
    }
    // A denial is remembered for half a minute.
    let (_, pods) = wait_until("the right is seen", seconds(45), || Some(ask(&token, "/pods")).filter(|(ok, _)| *ok));
    assert!(pods.contains("\"kind\":\"PodList\"") && pods.contains("shown"), "{pods}");
    let (ok, why) = ask(&token, "/containerLogs/default/shown/c");
    assert!(!ok && why.contains("subresource(s)=[proxy])"), "{why}");
    cluster.kubectl(&["delete", "clusterrolebinding/shows-pods", "clusterrole/shows-pods"]);
}
