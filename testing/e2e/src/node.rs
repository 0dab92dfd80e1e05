//! One kubelet on the stage's containerd: started, asked, killed, and cleaned up after, also when the test panics.

use std::fs;
use std::future::Future;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cri::{CriClient, ExecOutput, RuntimeMutator, RuntimeReader};
use cri_api::v1;
use model::report::PodReport;
use rig::{cgroup, mounts};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::{seconds, wait_until};

/// The node's name: the pods of static manifests end in `-e2e`.
pub const NODE: &str = "e2e";

/// One node at a time: a kubelet takes every pod of its runtime for its own.
static ONE: Mutex<()> = Mutex::new(());
static COUNT: AtomicU32 = AtomicU32::new(0);

/// What differs from the usual node.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Fields that are merged into the KubeletConfiguration; null takes one away.
    pub config: Value,
    /// More flags.
    pub flags: Vec<String>,
    /// Variables of the kubelet's environment.
    pub env: Vec<(String, String)>,
    /// Another program than `RUBELET_BIN`.
    pub program: Option<PathBuf>,
    /// The containerd of another stage than the one that all tests share.
    pub socket: Option<PathBuf>,
}

impl Options {
    /// With these fields of the KubeletConfiguration.
    #[must_use]
    pub fn config(mut self, fields: Value) -> Self {
        self.config = fields;
        self
    }

    /// With this flag.
    #[must_use]
    pub fn flag(mut self, flag: &str) -> Self {
        self.flags.push(flag.to_owned());
        self
    }

    /// With this variable in the kubelet's environment.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }

    /// On a stage of the test's own, which must outlive the node.
    #[must_use]
    pub fn on(mut self, stage: &rig::Stage) -> Self {
        self.socket = Some(stage.socket());
        self
    }
}

/// A kubelet with its own root directory, manifests, logs, cgroup root and ports.
pub struct Node {
    dir: PathBuf,
    stage: PathBuf,
    cgroup: String,
    config: Value,
    flags: Vec<String>,
    env: Vec<(String, String)>,
    program: PathBuf,
    child: Option<Child>,
    tokio: tokio::runtime::Runtime,
    cri: CriClient,
    _one: MutexGuard<'static, ()>,
}

impl Node {
    /// A node with a running, healthy kubelet.
    ///
    /// # Panics
    /// Without a stage (see the crate's documentation), or when the kubelet does not become healthy.
    #[track_caller]
    pub fn start() -> Self {
        Self::with(Options::default())
    }

    /// As [`Node::start`], with options.
    ///
    /// # Panics
    /// As [`Node::start`].
    #[track_caller]
    pub fn with(options: Options) -> Self {
        let mut node = Self::prepare(options);
        node.run();
        node
    }

    /// A node whose kubelet is yet to be started with [`Node::run`]: manifests can be written first.
    ///
    /// # Panics
    /// Without a stage.
    #[track_caller]
    pub fn prepare(options: Options) -> Self {
        let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let socket = options.socket.unwrap_or_else(socket);
        let (stage, taken) = taken(&socket);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}-{number}", std::process::id());
        let dir = stage.join("nodes").join(&name);
        for sub in ["manifests", "root", "logs"] {
            must("the node's directory", fs::create_dir_all(dir.join(sub)));
        }
        let cgroup = format!("{}/{name}", taken.cgroup);
        must("the node's cgroup", cgroup::create(&cgroup));
        let mut config = must("free ports", rig::kubelet::config(&socket, &dir, &cgroup));
        for (key, value) in options.config.as_object().into_iter().flatten() {
            config[key] = value.clone();
        }
        if let Some(fields) = config.as_object_mut() {
            fields.retain(|_, value| !value.is_null());
        }
        let tokio =
            must("a tokio runtime", tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build());
        let cri = {
            let _inside = tokio.enter();
            must(
                "the runtime's socket",
                CriClient::connect(&format!("unix://{}", socket.display()), None, seconds(120)),
            )
        };
        let program = options.program.unwrap_or_else(program);
        let certificates = format!("--cert-dir={}", dir.join("pki").display());
        let mut flags = vec![format!("--hostname-override={NODE}"), "--v=4".to_owned(), certificates];
        flags.extend(options.flags);
        Self { dir, stage, cgroup, config, flags, env: options.env, program, child: None, tokio, cri, _one: one }
    }

    /// Starts the kubelet and waits until it is healthy.
    ///
    /// # Panics
    /// When it is running already, ends, or is not healthy within 60 s.
    #[track_caller]
    pub fn run(&mut self) {
        self.spawn();
        wait_until("the kubelet is healthy", seconds(60), || {
            assert!(self.running(), "the kubelet ended; its log:\n{}", rig::tail(&self.log_file(), 30));
            rig::http::get_tcp(self.port("healthzPort"), "/healthz").ok().filter(|(code, _)| *code == 200)
        });
    }

    /// Starts the kubelet and does not wait for anything.
    ///
    /// # Panics
    /// When it is running already or cannot be started.
    #[track_caller]
    pub fn spawn(&mut self) {
        assert!(self.child.is_none(), "the kubelet runs already");
        let file = self.dir.join("config.json");
        must("the configuration", fs::write(&file, self.config.to_string()));
        let log = must("the log", fs::OpenOptions::new().create(true).append(true).open(self.log_file()));
        let child = Command::new(&self.program)
            .arg("--config")
            .arg(file)
            .arg("--root-dir")
            .arg(self.root())
            .args(&self.flags)
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .env("RUBELET_DEVICE_PLUGINS_DIR", "device-plugins")
            .stdin(Stdio::null())
            .stdout(must("the log", log.try_clone()))
            .stderr(log)
            .process_group(0)
            .spawn();
        self.child = Some(must(&self.program.display().to_string(), child));
    }

    /// Ends the kubelet with `SIGTERM` and says how it ended.
    ///
    /// # Panics
    /// When it is not running or still there after 30 s.
    #[track_caller]
    pub fn stop(&mut self) -> ExitStatus {
        self.signal(Signal::TERM);
        let Some(mut child) = self.child.take() else { panic!("the kubelet does not run") };
        wait_until("the kubelet ends after SIGTERM", seconds(30), || match child.try_wait() {
            Ok(ended) => ended,
            Err(e) => panic!("waiting for the kubelet: {e}"),
        })
    }

    /// `kill -9` of the kubelet; fine when it does not run.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// `kill -9`, then a new start on the same directories.
    ///
    /// # Panics
    /// As [`Node::run`].
    #[track_caller]
    pub fn restart(&mut self) {
        self.kill();
        self.run();
    }

    /// Sends the kubelet a signal.
    pub fn signal(&self, signal: Signal) {
        let pid = self.child.as_ref().and_then(|c| Pid::from_raw(c.id().cast_signed()));
        if let Some(pid) = pid {
            let _ = kill_process(pid, signal);
        }
    }

    /// True while the kubelet runs.
    pub fn running(&mut self) -> bool {
        self.child.as_mut().is_some_and(|c| matches!(c.try_wait(), Ok(None)))
    }

    /// The kubelet's process id, 0 when it does not run.
    pub fn pid(&self) -> u32 {
        self.child.as_ref().map_or(0, Child::id)
    }

    /// The node's directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The stage's directory (containerd's).
    pub fn stage(&self) -> &Path {
        &self.stage
    }

    /// `--root-dir`.
    pub fn root(&self) -> PathBuf {
        self.dir.join("root")
    }

    /// The directory of the static manifests.
    pub fn manifests(&self) -> PathBuf {
        self.dir.join("manifests")
    }

    /// The directory of the pods' logs (`podLogsDir`).
    pub fn logs(&self) -> PathBuf {
        self.dir.join("logs")
    }

    /// The cgroup root.
    pub fn cgroup(&self) -> &str {
        &self.cgroup
    }

    /// The kubelet's own log so far, over all its starts.
    pub fn log(&self) -> String {
        fs::read(self.log_file()).map(|b| String::from_utf8_lossy(&b).into_owned()).unwrap_or_default()
    }

    fn log_file(&self) -> PathBuf {
        self.dir.join("kubelet.log")
    }

    /// The KubeletConfiguration of the next start.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// Changes the KubeletConfiguration for the next start.
    pub fn configure(&mut self, key: &str, value: Value) {
        self.config[key] = value;
    }

    /// The flags of the next start, besides `--config` and `--root-dir`.
    pub fn flags(&self) -> &[String] {
        &self.flags
    }

    /// Changes the flags for the next start.
    pub fn set_flags(&mut self, flags: Vec<String>) {
        self.flags = flags;
    }

    /// The program under test.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// Changes the program for the next start.
    pub fn set_program(&mut self, program: PathBuf) {
        self.program = program;
    }

    /// A port of the configuration: `port`, `readOnlyPort`, `healthzPort`.
    pub fn port(&self, key: &str) -> u16 {
        self.config[key].as_u64().and_then(|p| u16::try_from(p).ok()).unwrap_or_default()
    }

    // Manifests.

    /// Puts a manifest into the directory in one step; a file of that name is replaced.
    ///
    /// # Panics
    /// When the file cannot be written.
    #[track_caller]
    pub fn write(&self, file: &str, pod: &Value) {
        self.write_bytes(file, pod.to_string().as_bytes());
    }

    /// As [`Node::write`], with any content.
    ///
    /// # Panics
    /// When the file cannot be written.
    #[track_caller]
    pub fn write_bytes(&self, file: &str, content: &[u8]) {
        let new = self.dir.join(format!(".{file}"));
        must("a manifest", fs::write(&new, content).and_then(|()| fs::rename(&new, self.manifests().join(file))));
    }

    /// Takes a manifest away.
    ///
    /// # Panics
    /// When there is no such file.
    #[track_caller]
    pub fn remove(&self, file: &str) {
        must("removing a manifest", fs::remove_file(self.manifests().join(file)));
    }

    // What the kubelet says.

    /// Status code and body of a path of the read-only port.
    pub fn get(&self, path: &str) -> Option<(u16, String)> {
        let (code, body) = rig::http::get_tcp(self.port("readOnlyPort"), path).ok()?;
        Some((code, String::from_utf8_lossy(&body).into_owned()))
    }

    /// The items of `/pods`; none while it does not answer.
    pub fn pods(&self) -> Vec<Value> {
        let list: Value = self.get("/pods").and_then(|(_, body)| serde_json::from_str(&body).ok()).unwrap_or_default();
        list["items"].as_array().cloned().unwrap_or_default()
    }

    /// A pod of `/pods`, by the name in its manifest.
    pub fn pod(&self, name: &str) -> Option<Value> {
        let full = format!("{name}-{NODE}");
        self.pods().into_iter().find(|p| p["metadata"]["name"] == full || p["metadata"]["name"] == name)
    }

    /// What rubelet's local socket says of its pods.
    pub fn reports(&self) -> Vec<PodReport> {
        let socket = self.root().join("rubelet/rubelet.sock");
        rig::http::get_unix(&socket, "/v1/pods")
            .ok()
            .and_then(|(_, b)| serde_json::from_slice(&b).ok())
            .unwrap_or_default()
    }

    /// Waits until the pod's phase is Running and all its containers run; gives the pod.
    ///
    /// # Panics
    /// When it takes longer than 60 s.
    #[track_caller]
    pub fn wait_running(&self, name: &str) -> Value {
        self.wait_pod(&format!("pod {name} runs"), name, |pod| {
            let statuses = pod["status"]["containerStatuses"].as_array();
            pod["status"]["phase"] == "Running"
                && statuses.is_some_and(|all| all.iter().all(|c| c["state"]["running"].is_object()))
        })
    }

    /// Waits until the pod in `/pods` is as `wanted`; gives the pod.
    ///
    /// # Panics
    /// When it takes longer than 60 s, with the pod's status.
    #[track_caller]
    pub fn wait_pod(&self, what: &str, name: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let found = std::cell::RefCell::new(None);
        let done = rig::poll(seconds(60), || {
            let pod = self.pod(name);
            let done = pod.as_ref().is_some_and(&wanted);
            *found.borrow_mut() = pod;
            done
        });
        match found.into_inner() {
            Some(pod) if done => pod,
            pod => panic!("{what}: not within 60 s; its status: {:#}", pod.unwrap_or_default()["status"]),
        }
    }

    // What the runtime says.

    /// Waits for a call of the runtime: `node.ask(node.cri().version())`.
    ///
    /// # Panics
    /// When the call fails.
    #[track_caller]
    pub fn ask<T>(&self, call: impl Future<Output = cri::CriResult<T>>) -> T {
        must("the runtime", self.tokio.block_on(call))
    }

    /// The runtime's client.
    pub fn cri(&self) -> &CriClient {
        &self.cri
    }

    /// The runtime's version, as it says it.
    ///
    /// # Panics
    /// When the runtime does not answer.
    pub fn runtime_version(&self) -> String {
        self.ask(self.cri.version()).runtime_version
    }

    /// All sandboxes.
    ///
    /// # Panics
    /// When the runtime does not answer.
    pub fn sandboxes(&self) -> Vec<v1::PodSandbox> {
        self.ask(self.cri.list_pod_sandbox(None))
    }

    /// All containers.
    ///
    /// # Panics
    /// When the runtime does not answer.
    pub fn containers(&self) -> Vec<v1::Container> {
        self.ask(self.cri.list_containers(None))
    }

    /// The containers of this name in a pod, the newest first, whether they run or not.
    ///
    /// # Panics
    /// When the runtime does not answer.
    pub fn containers_of(&self, pod: &str, container: &str) -> Vec<v1::Container> {
        let full = format!("{pod}-{NODE}");
        let of = |c: &v1::Container| {
            c.labels.get("io.kubernetes.pod.name") == Some(&full)
                && c.metadata.as_ref().is_some_and(|m| m.name == container)
        };
        let mut all: Vec<_> = self.containers().into_iter().filter(of).collect();
        all.sort_by_key(|c| std::cmp::Reverse(c.created_at));
        all
    }

    /// The newest container of this name in a pod.
    ///
    /// # Panics
    /// When there is none.
    #[track_caller]
    pub fn container(&self, pod: &str, container: &str) -> v1::Container {
        let mut all = self.containers_of(pod, container);
        assert!(!all.is_empty(), "the runtime has no container {container} of pod {pod}");
        all.swap_remove(0)
    }

    /// Status of a container by id.
    ///
    /// # Panics
    /// When the runtime does not know it.
    #[track_caller]
    pub fn status(&self, id: &str) -> v1::ContainerStatus {
        self.ask(self.cri.container_status(id, false)).status.unwrap_or_default()
    }

    /// Runs a command in the newest container of this name.
    ///
    /// # Panics
    /// When there is no such container or the runtime fails.
    #[track_caller]
    pub fn exec(&self, pod: &str, container: &str, command: &[&str]) -> ExecOutput {
        let id = self.container(pod, container).id;
        let command = command.iter().map(ToString::to_string).collect();
        self.ask(self.cri.exec_sync(&id, command, Some(seconds(20))))
    }

    /// The newest log of a container, in CRI's format ([`crate::lines`] takes the text out of it).
    pub fn container_log(&self, pod: &Value, container: &str) -> String {
        let text = |key: &str| pod["metadata"][key].as_str().unwrap_or_default().to_owned();
        let dir = self.logs().join(format!("{}_{}_{}", text("namespace"), text("name"), text("uid"))).join(container);
        let number = |p: &PathBuf| p.file_stem().and_then(|s| s.to_str()).and_then(|s| s.parse::<u32>().ok());
        let files = fs::read_dir(&dir).into_iter().flatten().flatten().map(|e| e.path());
        let newest = files.filter(|p| number(p).is_some()).max_by_key(|p| number(p));
        newest.and_then(|p| fs::read_to_string(p).ok()).unwrap_or_default()
    }

    /// Everything that there still is of the pod with this UID: in the runtime, on disk, mounts, cgroups.
    ///
    /// # Panics
    /// When the runtime does not answer.
    pub fn leftovers(&self, uid: &str) -> Vec<String> {
        let mut left = Vec::new();
        for c in self.containers() {
            if c.labels.get("io.kubernetes.pod.uid").is_some_and(|u| u == uid) {
                left.push(format!("container {}", c.id));
            }
        }
        for s in self.sandboxes() {
            if s.metadata.as_ref().is_some_and(|m| m.uid == uid) {
                left.push(format!("sandbox {}", s.id));
            }
        }
        let dir = self.root().join("pods").join(uid);
        left.extend(mounts::below(&dir).iter().map(|m| format!("mount {}", m.display())));
        if dir.exists() {
            left.push(format!("directory {}", dir.display()));
        }
        let ends = |p: &PathBuf, text: &str| p.to_string_lossy().ends_with(text);
        let logs = fs::read_dir(self.logs()).into_iter().flatten().flatten().map(|e| e.path());
        left.extend(logs.filter(|p| ends(p, &format!("_{uid}"))).map(|p| format!("logs {}", p.display())));
        let cgroups = cgroup::tree(&self.cgroup).into_iter().filter(|p| ends(p, &format!("/pod{uid}")));
        left.extend(cgroups.map(|p| format!("cgroup {}", p.display())));
        left
    }

    /// Waits until nothing is left of the pod with this UID.
    ///
    /// # Panics
    /// When something is left after `limit`, with what it is.
    #[track_caller]
    pub fn wait_gone(&self, uid: &str, limit: Duration) {
        let gone = rig::poll(limit, || self.leftovers(uid).is_empty());
        assert!(
            gone,
            "left of the pod {uid} after {} s; {}\n{:#?}",
            limit.as_secs(),
            self.standing(uid),
            self.leftovers(uid)
        );
    }

    /// How a pod stands, in a few words, for the message of a failed test: its newest steps and the states of its containers.
    fn standing(&self, uid: &str) -> String {
        let steps = self.reports().into_iter().find(|p| p.uid == uid).map(|p| {
            let newest = p.timeline.iter().rev().take(4).map(|s| {
                let since = s.started.duration_until(jiff::Timestamp::now()).as_secs();
                format!("{:?} {} {:?} ({since} s ago, {} times)", s.kind, s.subject, s.result, s.count)
            });
            format!("{} is {}\n{}", p.name, p.state, newest.collect::<Vec<_>>().join("\n"))
        });
        let mut states = std::collections::BTreeMap::<i32, usize>::new();
        for c in self.containers() {
            if c.labels.get("io.kubernetes.pod.uid").is_some_and(|u| u == uid) {
                *states.entry(c.state).or_default() += 1;
            }
        }
        let steps = steps.unwrap_or_else(|| "the agent does not know it".to_owned());
        format!("its containers by state {states:?}; {steps}")
    }

    /// Stops and removes a pod in the runtime, behind the kubelet's back.
    ///
    /// # Panics
    /// When the runtime refuses.
    #[track_caller]
    pub fn remove_from_runtime(&self, uid: &str) {
        for sandbox in self.sandboxes().into_iter().filter(|s| s.metadata.as_ref().is_some_and(|m| m.uid == uid)) {
            self.ask(self.cri.stop_pod_sandbox(&sandbox.id));
            self.ask(self.cri.remove_pod_sandbox(&sandbox.id));
        }
    }

    /// Removes every pod of the runtime, whoever made it.
    fn wipe_runtime(&self) {
        self.tokio.block_on(async {
            for sandbox in self.cri.list_pod_sandbox(None).await.unwrap_or_default() {
                let _ = self.cri.stop_pod_sandbox(&sandbox.id).await;
                let _ = self.cri.remove_pod_sandbox(&sandbox.id).await;
            }
        });
    }

    /// Keeps what tells why a test failed.
    pub fn keep(&self, test: &str) {
        let to = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/e2e")).join(test.replace("::", "-"));
        let _ = fs::create_dir_all(&to);
        for file in ["kubelet.log", "config.json"] {
            let _ = fs::copy(self.dir.join(file), to.join(file));
        }
        let _ = fs::copy(self.stage.join("containerd.log"), to.join("containerd.log"));
        eprintln!("the node's logs: {}; the end of the kubelet's:\n{}", to.display(), rig::tail(&self.log_file(), 20));
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            self.keep(std::thread::current().name().unwrap_or("test"));
        }
        self.wipe_runtime();
        rig::remove_log_links(&self.dir);
        let steps = [mounts::detach(&self.dir), cgroup::remove(&self.cgroup), mounts::remove_tree(&self.dir)];
        for step in steps {
            if let Err(e) = step {
                eprintln!("e2e: {e:#}");
            }
        }
    }
}

/// The socket of the containerd that all tests share.
#[track_caller]
fn socket() -> PathBuf {
    let Some(socket) = std::env::var_os("RUBELET_E2E_CONTAINERD_SOCK") else {
        panic!("no containerd: run this test with `cargo xtask test --only e2e`, or on a `cargo xtask containerd`");
    };
    socket.into()
}

/// The stage of a containerd, and what it took of the host.
#[track_caller]
fn taken(socket: &Path) -> (PathBuf, rig::Taken) {
    let stage = socket.parent().unwrap_or(Path::new("/")).to_owned();
    match must("the stage's record", rig::Record::read(&stage)).host {
        Some(taken) => (stage, taken),
        None => panic!("{} is not a stage", stage.display()),
    }
}

/// The address of the host on the network of the shared stage's pods.
#[track_caller]
pub(crate) fn address() -> String {
    taken(&socket()).1.gateway()
}

/// `RUBELET_BIN`, or the binary of the profile that this test was built in.
pub fn program() -> PathBuf {
    if let Some(named) = std::env::var_os("RUBELET_BIN") {
        return named.into();
    }
    let test = must("the test's own path", std::env::current_exe());
    // target/debug/deps/smoke-0123 → target/debug/rubelet
    test.ancestors().nth(2).unwrap_or(Path::new(".")).join("rubelet")
}

#[track_caller]
fn must<T, E: std::fmt::Debug>(what: &str, result: Result<T, E>) -> T {
    match result {
        Ok(value) => value,
        Err(e) => panic!("{what}: {e:?}"),
    }
}
