//! Files of configMaps, secrets and tokens while they change.

use std::fs;
use std::time::Duration;

use e2e::cluster::Cluster;
use e2e::{Share, container, pod, seconds, status, wait_until, with};
use rig::mounts;
use serde_json::{Value, json};

use crate::SLEEP;

/// How often something is changed that somebody reads: a number in this variable, or few enough for every day.
fn rounds(usual: usize) -> usize {
    std::env::var("RUBELET_E2E_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(usual)
}

fn merge(cluster: &Cluster, what: &str, fields: &Value) {
    cluster.api().merge(&format!("/api/v1/namespaces/default/{what}"), fields).unwrap();
}

/// What a volume of a pod shows on the host.
fn on_host(cluster: &Cluster, uid: &str, file: &str) -> String {
    fs::read_to_string(cluster.node.root().join("pods").join(uid).join("volumes").join(file)).unwrap_or_default()
}

/// kubernetes/kubernetes#68211, #89629, #127602, #61076, #105512.
pub(crate) fn by_sub_path_are_new_in_a_new_container_only(cluster: &mut Cluster) {
    let share = Share::new(&cluster.node);
    let count = rounds(5);
    cluster.create("configmaps", &json!({"metadata": {"name": "turns"}, "data": {"v": "0"}}));
    cluster.create("configmaps", &json!({"metadata": {"name": "early"}, "data": {"v": "old"}}));
    // Each round ends another container, since one that ends again and again waits longer each time.
    let one = |n: usize| {
        let script = format!(
            "cat /one >> /share/seen-{n}; until [ -e /share/end-{n} ]; do sleep .05; done; rm /share/end-{n}; cat /one >> /share/last-{n}; exit 1"
        );
        let mounts = json!({"volumeMounts": [{"name": "v", "mountPath": "/one", "subPath": "v"}]});
        with(container(&format!("c{n}"), &script), mounts)
    };
    let mut turns = pod("turns", (1..=count).map(one));
    turns["spec"]["volumes"] = json!([{"name": "v", "configMap": {"name": "turns"}}]);
    let turns = share.mounted(turns);
    cluster.run(&turns);
    // The volume is there and changes before the container that uses it is made.
    let mut between = pod(
        "between",
        [with(
            container("c", "cat /one >> /share/between"),
            json!({"volumeMounts": [{"name": "v", "mountPath": "/one", "subPath": "v"}]}),
        )],
    );
    between["spec"]["restartPolicy"] = json!("Never");
    between["spec"]["initContainers"] = json!([container("i", "until [ -e /share/go ]; do sleep .05; done")]);
    between["spec"]["volumes"] = json!([{"name": "v", "configMap": {"name": "early"}}]);
    cluster.run(&share.mounted(between));

    let uid = status::uid(&cluster.wait_running("turns"));
    let between = cluster.wait("it begins", "between", |p| status::runs(p, "i"));
    merge(cluster, "configmaps/early", &json!({"data": {"v": "new"}}));
    for n in 1..=count {
        merge(cluster, "configmaps/turns", &json!({"data": {"v": n.to_string()}}));
        merge(cluster, "pods/turns", &json!({"metadata": {"annotations": {"turn": n.to_string()}}}));
        wait_until("the volume is up to date", seconds(60), || {
            (on_host(cluster, &uid, "kubernetes.io~configmap/v/v") == n.to_string()).then_some(())
        });
        share.put(&format!("end-{n}"), "");
        wait_until("the next container reads", seconds(30), || {
            (share.read(&format!("seen-{n}")) == format!("0{n}")).then_some(())
        });
        assert_eq!(share.read(&format!("last-{n}")), "0", "a running container keeps its file");
    }
    wait_until("the volume is up to date", seconds(60), || {
        (on_host(cluster, &status::uid(&between), "kubernetes.io~configmap/v/v") == "new").then_some(())
    });
    share.put("go", "");
    cluster.wait("it succeeded", "between", |p| status::phase(p) == "Succeeded");
    assert_eq!(share.read("between"), "new");
    let mut mounted = mounts::below(&cluster.node.root().join("pods").join(&uid));
    mounted.sort();
    let all = mounted.len();
    mounted.dedup();
    assert_eq!(mounted.len(), all, "mounts on top of each other: {mounted:#?}");
    cluster.delete("turns");
    cluster.wait_gone("turns", seconds(30));
    crate::nothing_left(cluster, &uid);
}

/// kubernetes/kubernetes#114461, #114464, #57923, #60814.
pub(crate) fn change_all_at_once_and_always_have_their_owner(cluster: &mut Cluster) {
    let share = Share::new(&cluster.node);
    fs::set_permissions(share.dir(), std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let data = |version: usize| json!({"a": version.to_string(), "b": version.to_string(), "c": version.to_string()});
    cluster.create("configmaps", &json!({"metadata": {"name": "moves"}, "data": data(0)}));
    cluster.create("secrets", &json!({"metadata": {"name": "moves"}, "stringData": data(0)}));
    // One look holds on to one version of the directory. A file that is missing or differs counts only while that version is current.
    let script = r#"
        while [ ! -e /share/enough ]; do for v in /v/map /v/secret /v/all; do
            d=$(readlink -f $v/..data)
            seen=$(cat $d/a $d/deep/b $d/c 2>&1 | tr -d '\n'; stat -c ' %g %a' $d/a $d/deep/b $d/c 2>&1 | tr -d '\n')
            if [ "$d" = "$(readlink -f $v/..data)" ]; then
                echo "$v $seen" >> /share/looks
            fi
        done; done"#;
    let items = |mode: u32| json!([{"key": "a", "path": "a"}, {"key": "b", "path": "deep/b", "mode": mode}, {"key": "c", "path": "c"}]);
    let mounts = json!({"volumeMounts": [{"name": "map", "mountPath": "/v/map"}, {"name": "secret", "mountPath": "/v/secret"}, {"name": "all", "mountPath": "/v/all"}]});
    let mut manifest = pod("reads", [with(container("c", script), mounts)]);
    manifest["spec"]["securityContext"] = json!({"runAsUser": 1000, "fsGroup": 10000});
    manifest["spec"]["volumes"] = json!([
        {"name": "map", "configMap": {"name": "moves", "defaultMode": 0o440, "items": items(0o400)}},
        {"name": "secret", "secret": {"secretName": "moves", "defaultMode": 0o440, "items": items(0o400)}},
        {"name": "all", "projected": {"defaultMode": 0o440, "sources": [
            {"configMap": {"name": "moves", "items": [{"key": "a", "path": "a"}]}},
            {"configMap": {"name": "moves", "items": [{"key": "b", "path": "deep/b", "mode": 0o400}]}},
            {"configMap": {"name": "moves", "items": [{"key": "c", "path": "c"}]}},
        ]}},
    ]);
    cluster.run(&share.mounted(manifest));
    let uid = status::uid(&cluster.wait_running("reads"));
    let last = rounds(12);
    for version in 1..=last {
        merge(cluster, "configmaps/moves", &json!({"data": data(version)}));
        merge(cluster, "secrets/moves", &json!({"stringData": data(version)}));
        merge(cluster, "pods/reads", &json!({"metadata": {"annotations": {"version": version.to_string()}}}));
        std::thread::sleep(Duration::from_millis(250));
    }
    for file in ["kubernetes.io~configmap/map/c", "kubernetes.io~secret/secret/c", "kubernetes.io~projected/all/c"] {
        wait_until("the last change arrives", seconds(60), || {
            (on_host(cluster, &uid, file) == last.to_string()).then_some(())
        });
    }
    let from = share.lines("looks").len();
    wait_until("it was read", seconds(30), || (share.lines("looks").len() > from + 6).then_some(()));
    share.put("enough", "");
    let looks = share.lines("looks");
    let wrong: Vec<&String> = looks.iter().filter(|look| !is_whole(look)).collect();
    println!("{} looks while {last} versions came", looks.len());
    assert!(wrong.is_empty(), "{wrong:#?}");
    for (plugin, name) in [("configmap", "map"), ("secret", "secret"), ("projected", "all")] {
        let dir = cluster.node.root().join("pods").join(&uid).join(format!("volumes/kubernetes.io~{plugin}/{name}"));
        let versions = fs::read_dir(&dir)
            .unwrap()
            .flatten()
            .filter(|e| e.file_name().to_string_lossy().starts_with("..2"))
            .count();
        assert_eq!(versions, 1, "old versions in {}", dir.display());
    }
}

/// `VOLUME VVV GID MODE GID MODE GID MODE`: three times the same version, the group of the pod and the modes that were asked for.
fn is_whole(look: &str) -> bool {
    let mut fields = look.split(' ').skip(1);
    let versions = fields.next().unwrap_or_default();
    let part = versions.len() / 3;
    let same = part * 3 == versions.len() && part > 0 && versions == versions[..part].repeat(3);
    // What fsGroup gives the group can be read by it.
    same && fields.eq(["10000", "440"].into_iter().cycle().take(6))
}

/// kubernetes/kubernetes#82573, #89193, #78816, #129475, #137332. A defaultMode counts only for pods without users and groups of their own.
pub(crate) fn of_tokens_can_be_read_by_their_user(cluster: &mut Cluster) {
    let as_user = |user: u64| json!({"securityContext": {"runAsUser": user}});
    /// A pod, what its two containers and it are run as, the volume's mode, and what each container must see.
    type Case = (&'static str, [Value; 2], Value, u32, [&'static str; 2]);
    let cases: [Case; 6] = [
        ("nobody", [json!({}), json!({})], json!({}), 0o644, ["644 0 0", "644 0 0"]),
        ("same", [as_user(1000), as_user(1000)], json!({}), 0o644, ["600 1000 0", "600 1000 0"]),
        ("differ", [as_user(1000), as_user(2000)], json!({}), 0o644, ["644 0 0", "644 0 0"]),
        ("group", [as_user(1000), as_user(2000)], json!({"fsGroup": 2000}), 0o644, ["640 0 2000", "640 0 2000"]),
        ("mode", [json!({}), json!({})], json!({"runAsUser": 1000}), 0o444, ["600 1000 0", "600 1000 0"]),
        (
            "whole",
            [json!({}), json!({})],
            json!({"runAsUser": 1000, "fsGroup": 2000}),
            0o444,
            ["640 1000 2000", "640 1000 2000"],
        ),
    ];
    for (name, contexts, context, mode, _) in &cases {
        let mounts = json!({"volumeMounts": [{"name": "t", "mountPath": "/t"}]});
        let names = ["c", "d"];
        let mut manifest = pod(
            name,
            names.iter().zip(contexts).map(|(n, c)| with(with(container(n, SLEEP), mounts.clone()), c.clone())),
        );
        manifest["spec"]["securityContext"] = context.clone();
        manifest["spec"]["volumes"] = json!([{"name": "t", "projected": {"defaultMode": mode,
            "sources": [{"serviceAccountToken": {"path": "token", "expirationSeconds": 600}}]}}]);
        cluster.run(&manifest);
    }
    let mut wrong = Vec::new();
    for (name, _, _, _, expected) in &cases {
        let pod = cluster.wait_running(name);
        for (container, expected) in ["c", "d"].iter().zip(expected) {
            let seen =
                cluster.exec(&pod, container, &["sh", "-c", "stat -L -c '%a %u %g' /t/token; cut -c1-2 /t/token"]);
            if seen != format!("{expected}\ney\n") {
                wrong.push(format!("{name}, {container}: expected {expected}, is {seen}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
