//! The directory of static pods: what counts as a manifest, and what an edit does to a pod that runs.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::time::{Duration, Instant};

use e2e::share::{alive, most_at_once, noting};
use e2e::status::{id, restarts, runs, uid};
use e2e::{NODE, Node, Options, Share, container, pod, seconds, wait_until, with};
use serde_json::{Value, json};

const HOLD: &str = "exec sleep 1000000";

/// The pod with a UID of its own, so that an edit is an update of the same pod.
fn with_uid(mut manifest: Value, uid: &str) -> Value {
    manifest["metadata"]["uid"] = json!(uid);
    manifest
}

fn image(tag: &str) -> Value {
    json!({"image": format!("lab.test/busybox:{tag}")})
}

/// A pod of another edition each time, whose runs are noted in `/share/NAME`.
fn edition(share: &Share, name: &str, edition: usize) -> Value {
    share.mounted(pod(name, [container("c", &noting(name, &edition.to_string(), 0.0))]))
}

/// The ids of the sandboxes of a pod, by the name in its manifest.
fn sandboxes(node: &Node, name: &str) -> Vec<String> {
    let full = format!("{name}-{NODE}");
    let of = |s: &cri_api::v1::PodSandbox| s.metadata.as_ref().is_some_and(|m| m.name == full);
    node.sandboxes().into_iter().filter(of).map(|s| s.id).collect()
}

/// A pod that no edit of another may touch.
struct Bystander {
    container: String,
}

impl Bystander {
    fn start(node: &Node) -> Self {
        node.write("a-bystander.yaml", &pod("bystander", [container("c", HOLD)]));
        Self { container: id(&node.wait_running("bystander"), "c").to_owned() }
    }

    #[track_caller]
    fn untouched(&self, node: &Node) {
        let now = node.pod("bystander").unwrap();
        assert_eq!(id(&now, "c"), self.container, "the bystander's container was replaced");
        assert_eq!(restarts(&now, "c"), 0);
        assert!(runs(&now, "c"));
    }
}

/// kubernetes/kubernetes#104648: a pod of the same UID that comes back while its last run still ends.
#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn a_fixed_uid_that_is_removed_and_put_back_runs_again() {
    const UID: &str = "5d0be5dc-6c0f-4f6b-9d2e-3a6c1f7e0a01";
    let node = Node::start();
    let share = Share::new(&node);
    let edition = |number: usize, tag: &str| {
        let main = with(container("c", &noting("runs", &number.to_string(), 2.0)), image(tag));
        let mut manifest = share.mounted(with_uid(pod("back", [main]), UID));
        manifest["spec"]["terminationGracePeriodSeconds"] = json!(20);
        manifest
    };
    let runs_now = || alive(&share.lines("runs"));
    node.write("back.yaml", &edition(0, "1"));
    wait_until("the first run", seconds(30), || (runs_now().len() == 1).then_some(()));

    let mut again = 0;
    for (round, gap) in [300, 1700, 900, 2600, 400].into_iter().enumerate() {
        let before = runs_now();
        node.remove("back.yaml");
        std::thread::sleep(Duration::from_millis(gap));
        let number = round + 1;
        node.write("back.yaml", &edition(number, "1"));
        // On a machine so slow that the file was back before anybody looked, there is nothing to end.
        let told = format!("term {}", before[0]);
        if !rig::poll(seconds(3), || share.lines("runs").contains(&told)) {
            continue;
        }
        again += 1;
        wait_until(&format!("round {round}: the newest edition runs"), seconds(40), || {
            let now = runs_now();
            let newest = now.len() == 1 && share.read("runs").contains(&format!("start {} {number}\n", now[0]));
            (newest && now != before).then_some(())
        });
    }
    assert!(again >= 3, "only {again} of 5 removals were noticed");
    let shown = node.wait_pod("/pods shows the newest edition", "back", |p| runs(p, "c"));
    assert!(shown["spec"]["containers"][0]["command"][2].as_str().unwrap().contains(" 5 >>"));

    // Overwritten many times within a second: the last one counts.
    for number in 10..20 {
        node.write("back.yaml", &edition(number, if number % 2 == 0 { "1" } else { "2" }));
        std::thread::sleep(Duration::from_millis(80));
    }
    wait_until("the last of ten editions runs", seconds(40), || {
        let now = runs_now();
        let last = now.len() == 1 && share.read("runs").contains(&format!("start {} 19\n", now[0]));
        last.then_some(())
    });

    node.remove("back.yaml");
    node.wait_gone(UID, seconds(60));
    let lines = share.lines("runs");
    assert_eq!(most_at_once(&lines), 1, "two runs at once: {lines:#?}");
    let count = |word: &str| lines.iter().filter(|l| l.starts_with(word)).count();
    assert_eq!(count("stop"), count("start"), "a run had not its whole grace: {lines:#?}");
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn what_counts_as_a_manifest() {
    let mut node = Node::prepare(Options::default());
    let dir = node.manifests();
    let plain = |name: &str| pod(name, [container("c", HOLD)]);
    let put = |file: &str, content: &[u8]| fs::write(dir.join(file), content).unwrap();
    let pod_at = |file: &str, pod: &Value| put(file, pod.to_string().as_bytes());

    pod_at("good.json", &plain("good"));
    pod_at("no-extension", &plain("plain"));
    pod_at("other.yaml.bak", &plain("backup"));
    put("yaml.yml", format!("# a comment\napiVersion: v1\nkind: Pod\nmetadata: {{name: yaml}}\nspec:\n  terminationGracePeriodSeconds: 1\n  containers:\n  - name: c\n    image: {}\n    command: [sleep, \"1000000\"]\n---\nnot: read\n", rig::containerd::BUSYBOX).as_bytes());
    let outside = node.dir().join("linked.json");
    fs::write(&outside, plain("linked").to_string()).unwrap();
    symlink(&outside, dir.join("link.json")).unwrap();
    pod_at("unknown-field.json", &with(plain("unknown"), json!({"nonsense": 1})));
    // The same pod name twice: the last in the order of names counts, so a backup copy wins.
    pod_at("twice.yaml", &pod("twice", [with(container("c", HOLD), image("1"))]));
    pod_at("twice.yaml.bak", &pod("twice", [with(container("c", HOLD), image("2"))]));

    put("empty.yaml", b"");
    put("broken.yaml", b"a: [b\n  c: }");
    put("binary", &(0..3000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect::<Vec<u8>>());
    pod_at(".hidden.json", &plain("hidden"));
    fs::create_dir(dir.join("folder.yaml")).unwrap();
    pod_at("folder.yaml/inner.json", &plain("inner"));
    symlink(node.dir().join("nowhere"), dir.join("dangling.json")).unwrap();
    put(
        "service.json",
        json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}}).to_string().as_bytes(),
    );
    let mut nameless = plain("x");
    nameless["metadata"].as_object_mut().unwrap().remove("name");
    pod_at("nameless.json", &nameless);
    let volume = |name: &str, source: Value| {
        let mut p = plain(name);
        p["spec"]["volumes"] = json!([with(json!({"name": "v"}), source)]);
        p
    };
    pod_at("secret.json", &volume("secret", json!({"secret": {"secretName": "x"}})));
    pod_at("claim.json", &volume("claim", json!({"persistentVolumeClaim": {"claimName": "x"}})));
    let from = json!({"envFrom": [{"configMapRef": {"name": "x", "optional": true}}]});
    pod_at("config-map.json", &pod("configmap", [with(container("c", HOLD), from)]));
    let mut account = plain("account");
    account["spec"]["serviceAccountName"] = json!("x");
    pod_at("account.json", &account);

    node.run();
    let good = ["good", "plain", "backup", "yaml", "linked", "unknown", "twice"];
    for name in good {
        node.wait_running(name);
    }
    let full = |name: &str| format!("{name}-{NODE}");
    let mut expected: Vec<String> = good.map(full).to_vec();
    expected.sort();
    // The bad ones were read before the good ones ran; one periodic check more.
    std::thread::sleep(seconds(2));
    let mut names: Vec<String> = node.sandboxes().into_iter().filter_map(|s| s.metadata).map(|m| m.name).collect();
    names.sort();
    assert_eq!(names, expected, "what runs");
    let mut shown: Vec<String> =
        node.pods().iter().filter_map(|p| p["metadata"]["name"].as_str().map(str::to_owned)).collect();
    shown.sort();
    assert_eq!(shown, expected, "what /pods shows");
    assert_eq!(node.pod("twice").unwrap()["spec"]["containers"][0]["image"], "lab.test/busybox:2");
    let log = node.log();
    for bad in [
        "empty.yaml",
        "broken.yaml",
        "binary",
        "service.json",
        "nameless.json",
        "secret.json",
        "claim.json",
        "config-map.json",
        "account.json",
    ] {
        assert!(log.contains(&format!("manifests/{bad}")), "the log does not name {bad}");
    }

    // The good ones are still looked after.
    let before = uid(&node.pod("good").unwrap());
    pod_at("good.json", &pod("good", [container("c", "exec sleep 2000000")]));
    let changed = node.wait_pod("the changed pod runs", "good", |p| uid(p) != before && runs(p, "c"));
    assert_eq!(changed["spec"]["containers"][0]["command"][2], "exec sleep 2000000");
    node.wait_gone(&before, seconds(60));
    // Without the copy the other one counts.
    fs::remove_file(dir.join("twice.yaml.bak")).unwrap();
    node.wait_pod("the first of the two runs", "twice", |p| {
        p["spec"]["containers"][0]["image"] == "lab.test/busybox:1" && runs(p, "c")
    });
    // A file that was bad becomes good.
    pod_at("broken.yaml", &plain("mended"));
    node.wait_running("mended");
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn an_edit_of_a_pod_with_a_fixed_uid_touches_what_it_names() {
    const UID: &str = "5d0be5dc-6c0f-4f6b-9d2e-3a6c1f7e0a02";
    let node = Node::start();
    let bystander = Bystander::start(&node);
    let of = |containers: Vec<Value>| with_uid(pod("edit", containers), UID);
    let one = |tag: &str| with(container("one", HOLD), image(tag));
    node.write("edit.yaml", &of(vec![one("1")]));
    let first = node.wait_running("edit");
    let sandbox = sandboxes(&node, "edit");

    // A container more: it starts beside the first.
    node.write("edit.yaml", &of(vec![one("1"), container("two", HOLD)]));
    let grown = node.wait_pod("the added container runs", "edit", |p| runs(p, "one") && runs(p, "two"));
    assert_eq!(id(&grown, "one"), id(&first, "one"));
    assert_eq!(restarts(&grown, "one"), 0);

    // As an editor saves: the old file moved aside, a new one written bit by bit, the old one removed.
    let dir = node.manifests();
    fs::rename(dir.join("edit.yaml"), dir.join("edit.yaml~")).unwrap();
    let text = of(vec![one("2"), container("two", HOLD)]).to_string();
    let mut file = fs::File::create(dir.join("edit.yaml")).unwrap();
    file.write_all(&text.as_bytes()[..text.len() / 2]).unwrap();
    std::thread::sleep(Duration::from_millis(30));
    file.write_all(&text.as_bytes()[text.len() / 2..]).unwrap();
    drop(file);
    fs::remove_file(dir.join("edit.yaml~")).unwrap();
    let edited = node.wait_pod("the new image runs", "edit", |p| runs(p, "one") && id(p, "one") != id(&first, "one"));
    assert_eq!(edited["spec"]["containers"][0]["image"], "lab.test/busybox:2");
    assert_eq!(id(&edited, "two"), id(&grown, "two"));
    assert_eq!(restarts(&edited, "two"), 0);
    assert_eq!(uid(&edited), UID);
    assert_eq!(sandboxes(&node, "edit"), sandbox, "the sandbox was replaced");
    bystander.untouched(&node);
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn edits_of_all_kinds_end_in_the_newest_pod() {
    // Changes are seen by inotify alone.
    let node = Node::with(Options::default().config(json!({"fileCheckFrequency": "30s"})));
    let share = Share::new(&node);
    let bystander = Bystander::start(&node);
    let newest = |name: &str, number: usize| {
        wait_until(&format!("edition {number} of {name} runs alone"), seconds(60), || {
            let now = alive(&share.lines(name));
            let shown = now.len() == 1 && share.read(name).contains(&format!("start {} {number}\n", now[0]));
            (shown && sandboxes(&node, name).len() == 1).then_some(())
        });
        assert_eq!(most_at_once(&share.lines(name)), 1, "{name}: {:#?}", share.lines(name));
    };

    // Removed while they start, at one moment or another.
    let uids: Vec<String> = (0..6).map(|n| format!("5d0be5dc-6c0f-4f6b-9d2e-3a6c1f7e0b0{n}")).collect();
    let start = Instant::now();
    for (n, uid) in uids.iter().enumerate() {
        let mut early = pod(&format!("early{n}"), [container("c", HOLD)]);
        early["spec"]["initContainers"] = json!([container("i", "sleep .3")]);
        early["spec"]["volumes"] = json!([{"name": "m", "emptyDir": {"medium": "Memory"}}]);
        node.write(&format!("early{n}.yaml"), &with_uid(early, uid));
    }
    for (n, at) in [15, 150, 500, 1000, 1600, 2300].into_iter().enumerate() {
        std::thread::sleep(Duration::from_millis(at).saturating_sub(start.elapsed()));
        node.remove(&format!("early{n}.yaml"));
    }

    // Another pod each time (its UID comes from its content), ten times in a second.
    node.write("often.yaml", &edition(&share, "often", 0));
    node.write("grows.yaml", &edition(&share, "grows", 0));
    newest("often", 0);
    newest("grows", 0);
    let old = uid(&node.pod("grows").unwrap());
    for number in 1..=10 {
        node.write("often.yaml", &edition(&share, "often", number));
        std::thread::sleep(Duration::from_millis(90));
    }
    // A container more makes another pod of it.
    let mut grown = edition(&share, "grows", 1);
    grown["spec"]["containers"].as_array_mut().unwrap().push(container("more", HOLD));
    node.write("grows.yaml", &grown);
    newest("often", 10);
    newest("grows", 1);
    node.wait_pod("the added container runs", "grows", |p| runs(p, "more"));
    node.wait_gone(&old, seconds(60));
    for uid in &uids {
        node.wait_gone(uid, seconds(60));
    }

    // Half-written, then completed; the one that ran before runs on until then.
    let path = node.manifests().join("half.yaml");
    let text = edition(&share, "half", 0).to_string();
    fs::write(&path, &text[..text.len() / 2]).unwrap();
    std::thread::sleep(seconds(1));
    assert!(sandboxes(&node, "half").is_empty());
    fs::write(&path, &text).unwrap();
    newest("half", 0);
    fs::write(&path, &text[..text.len() / 3]).unwrap();
    std::thread::sleep(seconds(1));
    assert_eq!(alive(&share.lines("half")).len(), 1);
    fs::write(&path, &text).unwrap();
    std::thread::sleep(seconds(1));
    assert_eq!(share.lines("half").len(), 1, "a half-written file stopped its pod: {:#?}", share.lines("half"));

    // A link that is turned to another file in one step.
    for number in 0..2 {
        let target = node.dir().join(format!("target{number}"));
        fs::write(&target, edition(&share, "link", number).to_string()).unwrap();
        symlink(&target, node.dir().join("new-link")).unwrap();
        fs::rename(node.dir().join("new-link"), node.manifests().join("link.yaml")).unwrap();
        newest("link", number);
    }
    bystander.untouched(&node);
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn files_that_are_meant_ill_do_no_harm() {
    const LIMIT: usize = 10 << 20;
    let mut node = Node::start();
    let bystander = Bystander::start(&node);
    let padded = |name: &str, size: usize| {
        let mut text = pod(name, [container("c", HOLD)]).to_string().into_bytes();
        text.resize(size, b' ');
        text
    };
    node.write_bytes("full.json", &padded("full", LIMIT));
    node.write_bytes("over.json", &padded("over", LIMIT + 1));
    node.write_bytes("huge.json", &vec![b'['; 3 * LIMIT]);
    node.write_bytes("deep.json", &vec![b'['; 1 << 20]);
    let mut bomb = String::from("a0: &a0 [x,x,x,x,x,x,x,x,x]\n");
    for n in 1..12 {
        let last = format!("*a{},", n - 1).repeat(9);
        bomb.push_str(&format!("a{n}: &a{n} [{}]\n", last.trim_end_matches(',')));
    }
    node.write_bytes("bomb.yaml", bomb.as_bytes());
    // The same as a pod would carry it.
    let labels = format!("{bomb}apiVersion: v1\nkind: Pod\nmetadata: {{name: bomb}}\nspec: {{containers: *a11}}\n");
    node.write_bytes("bomb-pod.yaml", labels.as_bytes());
    node.write_bytes(
        "binary.yaml",
        &(0..100_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 11) as u8).collect::<Vec<u8>>(),
    );
    node.write_bytes("zeros", &vec![0; 1 << 20]);
    node.write_bytes("tabs.yaml", b"apiVersion: v1\n\tkind: Pod\n");

    node.wait_running("full");
    node.write("after.yaml", &pod("after", [container("c", HOLD)]));
    node.wait_running("after");
    let log = wait_until("the log names every bad file", seconds(20), || {
        let log = node.log();
        let bad =
            ["over.json", "huge.json", "deep.json", "bomb.yaml", "bomb-pod.yaml", "binary.yaml", "zeros", "tabs.yaml"];
        bad.iter().all(|b| log.contains(&format!("manifests/{b}"))).then_some(log)
    });
    assert!(log.lines().all(|l| l.len() < 20_000), "a bad file was printed into the log");
    assert!(node.running(), "the kubelet ended");
    let mut names: Vec<String> = node.sandboxes().into_iter().filter_map(|s| s.metadata).map(|m| m.name).collect();
    names.sort();
    assert_eq!(names, ["after", "bystander", "full"].map(|n| format!("{n}-{NODE}")));
    bystander.untouched(&node);
    // Peak memory of the process: three readings of 10 MB and what a bomb must not become.
    let status = fs::read_to_string(format!("/proc/{}/status", node.pid())).unwrap();
    let peak = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).unwrap();
    let peak: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(peak < 400 << 10, "{} MiB at its peak", peak >> 10);
}
