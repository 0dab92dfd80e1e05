//! What is wrong with a node's way into the cluster is told in one line, by `check` and by `explain`, and mended without a restart.
//!
//! Each fault has an agent of its own, all at once, on a runtime in memory: only what is between them and the API server counts.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use e2e::cluster::Cluster;
use e2e::{program, seconds, wait_until};
use fakes::{FakeRuntime, FakeServer};
use rig::cluster::{is_ready, pki::Authority, pki::Pair};
use serde_json::{Value, json};

use crate::is_rubelet;

/// An agent with a directory of its own.
struct Agent {
    name: String,
    dir: PathBuf,
    kubeconfig: PathBuf,
    /// The certificate, key, token and authority that its kubeconfig names.
    pair: Pair,
    token: PathBuf,
    authority: PathBuf,
    child: Option<Child>,
    _runtime: FakeServer,
}

impl Drop for Agent {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = rig::mounts::detach(&self.dir);
    }
}

/// In one step, as whoever renews a file does it.
fn put(from: &Path, to: &Path) {
    let new = to.with_extension("new");
    fs::copy(from, &new).and_then(|_| fs::rename(&new, to)).unwrap();
}

impl Agent {
    fn new(cluster: &Cluster, name: &str, by_token: bool) -> Self {
        let dir = cluster.node.dir().join("agents").join(name);
        for sub in ["manifests", "logs", "root", "pki"] {
            fs::create_dir_all(dir.join(sub)).unwrap();
        }
        let pair = Pair { certificate: dir.join("pki/client.crt"), key: dir.join("pki/client.key") };
        let (token, authority) = (dir.join("pki/token"), dir.join("pki/ca.crt"));
        put(cluster.plane.authority(), &authority);
        let user = if by_token {
            json!({"tokenFile": token})
        } else {
            json!({"client-certificate": pair.certificate, "client-key": pair.key})
        };
        let kubeconfig = cluster.plane.kubeconfig_of(name, &cluster.plane.url(), &authority, &user).unwrap();
        let socket = dir.join("cri.sock");
        let runtime = fakes::serve(&FakeRuntime::new(1), &socket).unwrap();
        let mut config = rig::kubelet::config(&socket, &dir, "").unwrap();
        for (key, value) in [
            ("cgroupsPerQOS", json!(false)),
            ("enforceNodeAllocatable", json!([])),
            ("enableServer", json!(false)),
            ("readOnlyPort", json!(0)),
        ] {
            config[key] = value;
        }
        config.as_object_mut().unwrap().remove("cgroupRoot");
        fs::write(dir.join("config.json"), config.to_string()).unwrap();
        Self { name: name.to_owned(), dir, kubeconfig, pair, token, authority, child: None, _runtime: runtime }
    }

    /// Gives it this certificate.
    fn certify(&self, pair: &Pair) {
        // The key first: a pair that does not fit is not taken.
        put(&pair.key, &self.pair.key);
        put(&pair.certificate, &self.pair.certificate);
    }

    fn flags(&self) -> Vec<String> {
        let at = |flag: &str, path: &Path| format!("--{flag}={}", path.display());
        vec![
            at("config", &self.dir.join("config.json")),
            at("root-dir", &self.dir.join("root")),
            at("cert-dir", &self.dir.join("pki")),
            at("kubeconfig", &self.kubeconfig),
            format!("--hostname-override={}", self.name),
            "--v=2".to_owned(),
        ]
    }

    fn start(&mut self) {
        let log = fs::File::create(self.dir.join("log")).unwrap();
        let mut command = Command::new(program());
        command
            .args(self.flags())
            .env("RUBELET_DEVICE_PLUGINS_DIR", "device-plugins")
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        self.child = Some(command.spawn().unwrap());
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir.join("log")).unwrap_or_default()
    }

    /// Warnings and errors that say this.
    fn complaints(&self, words: &str) -> Vec<String> {
        let log = self.log();
        log.lines().filter(|l| l.starts_with(['W', 'E']) && l.contains(words)).map(str::to_owned).collect()
    }

    /// What a subcommand prints.
    fn says(&self, arguments: &[&str]) -> String {
        let out = Command::new(program()).args(arguments).stdin(Stdio::null()).output().unwrap();
        String::from_utf8_lossy(&out.stdout).into_owned()
    }

    fn check(&self) -> String {
        let flags = self.flags();
        let mut arguments = vec!["check"];
        arguments.extend(flags.iter().map(String::as_str));
        self.says(&arguments)
    }

    fn explain(&self) -> String {
        self.says(&["explain", "node", "--root-dir", self.dir.join("root").to_str().unwrap()])
    }
}

const BINDINGS: &str = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings";

fn may_everything(cluster: &Cluster, name: &str, subject: Value) {
    let binding = json!({"metadata": {"name": name}, "subjects": [subject],
        "roleRef": {"kind": "ClusterRole", "apiGroup": "rbac.authorization.k8s.io", "name": "cluster-admin"}});
    cluster.api().create(BINDINGS, &binding).unwrap();
}

/// A token of a service account that is made for it.
fn token(cluster: &Cluster, account: &str) -> String {
    cluster.create("serviceaccounts", &json!({"metadata": {"name": account}}));
    let ask =
        json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}});
    let answer = cluster.api().create(&format!("/api/v1/namespaces/default/serviceaccounts/{account}/token"), &ask);
    answer.unwrap()["status"]["token"].as_str().unwrap().to_owned()
}

pub(crate) fn that_are_bad_are_told_once_and_mended_without_a_restart(cluster: &mut Cluster) {
    if !is_rubelet(cluster) {
        return;
    }
    let tokio = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let _inside = tokio.enter();
    const NODES: Option<&str> = Some("system:nodes");
    let signer = cluster.plane.signer();
    let other = Authority::new(cluster.node.dir(), "other-authority").unwrap();
    let user = |name: &str| format!("system:node:{name}");
    let good = |name: &str| signer.issue(&format!("good-{name}"), &user(name), NODES, &[]).unwrap();
    let agent = |name: &str| Agent::new(cluster, name, name == "revoked");

    let expired = agent("expired");
    expired.certify(&signer.issue_within("expired", &user("expired"), NODES, -7200, -3600).unwrap());
    let early = agent("early");
    early.certify(&signer.issue_within("early", &user("early"), NODES, 3600, 7200).unwrap());
    let stranger = agent("stranger");
    stranger.certify(&other.issue("stranger", &user("stranger"), NODES, &[]).unwrap());
    let misled = agent("misled");
    misled.certify(&good("misled"));
    put(&other.own.certificate, &misled.authority);
    let misnamed = agent("misnamed");
    misnamed.certify(&good("another"));
    let powerless = agent("powerless");
    powerless.certify(&signer.issue("powerless", "nobody", None, &[]).unwrap());
    let revoked = agent("revoked");
    fs::write(&revoked.token, token(cluster, "agent")).unwrap();
    may_everything(cluster, "agent", json!({"kind": "ServiceAccount", "namespace": "default", "name": "agent"}));
    cluster.api().delete("/api/v1/namespaces/default/serviceaccounts/agent", &Value::Null).unwrap();

    // What everybody is told, and whether it is true of every request.
    let words = [
        "client certificate FILE expired at",
        "the client certificate FILE is not valid before",
        "the API server does not know the client certificate FILE: renew it",
        "the CA in the kubeconfig did not sign the API server's certificate",
        "the credentials belong to another node: the kubeconfig and --hostname-override must name the same node",
        "RBAC or the node authorizer refuses it: the client needs user system:node:NAME in group system:nodes",
        "the API server does not know the token in TOKEN: renew it",
    ];
    let mut agents = [expired, early, stranger, misled, misnamed, powerless, revoked];
    let words: Vec<String> = agents
        .iter()
        .zip(words)
        .map(|(a, w)| {
            w.replace("FILE", &a.pair.certificate.display().to_string())
                .replace("TOKEN", &a.token.display().to_string())
        })
        .collect();
    for agent in &mut agents {
        agent.start();
    }
    let start = Instant::now();
    for (agent, words) in agents.iter().zip(&words) {
        let told = || (!agent.complaints(words).is_empty()).then_some(());
        let found = rig::poll(seconds(60), || told().is_some());
        assert!(found, "{} does not say {words:?}; its log:\n{}", agent.name, agent.log());
    }
    for (agent, words) in agents.iter().zip(&words) {
        let check = agent.check();
        assert!(check.contains(words), "check of {} does not say {words:?}:\n{check}", agent.name);
        wait_until(&format!("explain says what is wrong with {}", agent.name), seconds(30), || {
            let text = agent.explain();
            text.contains(words).then_some(text)
        });
    }
    // Long enough for several tries of everybody who asks.
    std::thread::sleep(seconds(12).saturating_sub(start.elapsed()));
    for (agent, words) in agents.iter().zip(&words) {
        let told = agent.complaints("");
        let of_this: Vec<&String> = told.iter().filter(|l| l.contains(words)).collect();
        if agent.name == "misnamed" || agent.name == "powerless" {
            // A right is missing of each kind of request, so each has its line.
            let mut texts: Vec<&str> =
                of_this.iter().map(|l| l.split_once("] ").map_or("", |(_, text)| text)).collect();
            texts.sort_unstable();
            let all = texts.len();
            texts.dedup();
            assert!(texts.len() == all && all < 10, "{}: {told:#?}", agent.name);
        } else {
            assert_eq!(of_this.len(), 1, "{}: {told:#?}", agent.name);
        }
    }

    // Mended: by new files, or by a right.
    let [expired, early, stranger, misled, misnamed, _, revoked] = &agents;
    for agent in [expired, early, stranger, misnamed] {
        agent.certify(&good(&agent.name));
    }
    put(cluster.plane.authority(), &misled.authority);
    may_everything(
        cluster,
        "powerless",
        json!({"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": "nobody"}),
    );
    fs::write(revoked.token.with_extension("new"), token(cluster, "agent")).unwrap();
    fs::rename(revoked.token.with_extension("new"), &revoked.token).unwrap();
    let mended = Instant::now();
    for agent in &agents {
        let path = format!("/api/v1/nodes/{}", agent.name);
        let joined = || cluster.api().find(&path).unwrap().is_some_and(|n| is_ready(&n));
        assert!(rig::poll(seconds(60), joined), "{} does not join; its log:\n{}", agent.name, agent.log());
        println!("{} has joined {:.0} s after it was mended", agent.name, mended.elapsed().as_secs_f64());
    }
    for agent in &agents {
        wait_until(&format!("explain says that all is well with {}", agent.name), seconds(90), || {
            agent.explain().contains("answers; node and pods are watched").then_some(())
        });
        let check = agent.check();
        assert!(check.contains("answers and knows this node"), "{}: {check}", agent.name);
    }
    for agent in agents {
        let name = agent.name.clone();
        drop(agent);
        cluster.api().delete(&format!("/api/v1/nodes/{name}"), &Value::Null).unwrap();
    }
    for name in ["agent", "powerless"] {
        cluster.api().delete(&format!("{BINDINGS}/{name}"), &Value::Null).unwrap();
    }
}
