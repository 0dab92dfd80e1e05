//! A private control plane on the loopback address: etcd and kube-apiserver, with scheduler and controller manager when asked for.
//!
//! ```no_run
//! use rig::cluster::{ControlPlane, Options};
//!
//! let plane = ControlPlane::start("test", Options::default())?;
//! let kubeconfig = plane.node_kubeconfig("n1")?; // for `--kubeconfig`
//! plane.namespace("a")?;
//! assert!(plane.api().list("/api/v1/nodes")?.is_empty());
//! plane.stop_api_server();
//! plane.start_api_server()?;
//! plane.close()?;
//! # anyhow::Ok(())
//! ```
//!
//! Its directory below `/var/tmp` holds data, keys and logs. The programs come from `lab()/bin` (`lab/build-reference` builds them) and
//! end with their owner, whatever becomes of it; the directory goes with [`ControlPlane::close`], when it is dropped, or by
//! [`crate::Remains::wipe`]. Root is not needed.

mod api;
mod objects;
pub mod pki;
mod proxy;

pub use api::{Api, Refused};
pub use proxy::{Gate, Proxy, Way};

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::record;
use pki::{Authority, Pair};

/// The addresses of Services; no packet is ever sent to one, since there is no kube-proxy.
const SERVICES: &str = "10.96.0.0/16";
/// The first of them: the Service `kubernetes`.
const SERVICE_ADDRESS: &str = "10.96.0.1";
const HOST: &str = "127.0.0.1";
/// As whom the API server passes requests on to servers of other APIs (APIService).
const FRONT_PROXY: &str = "front-proxy-client";
/// Longest start of one part, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(90);

/// The parts of a control plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// etcd.
    Etcd,
    /// kube-apiserver.
    ApiServer,
    /// kube-scheduler.
    Scheduler,
    /// kube-controller-manager.
    ControllerManager,
}

impl Part {
    /// The program's name, which is also the log's.
    pub fn program(self) -> &'static str {
        match self {
            Self::Etcd => "etcd",
            Self::ApiServer => "kube-apiserver",
            Self::Scheduler => "kube-scheduler",
            Self::ControllerManager => "kube-controller-manager",
        }
    }
}

/// What differs from the smallest control plane.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Run kube-scheduler; without it a pod names its node itself (`spec.nodeName`).
    pub scheduler: bool,
    /// Run kube-controller-manager; without it [`ControlPlane::namespace`] makes what a namespace needs.
    pub controller_manager: bool,
    /// More flags of kube-apiserver.
    pub api_server_flags: Vec<String>,
}

impl Options {
    /// With all parts.
    pub fn all() -> Self {
        Self { scheduler: true, controller_manager: true, ..Self::default() }
    }
}

/// The names by which `lab/build-reference` knows the programs that are not there, kubectl among them.
pub fn missing(options: &Options) -> Vec<&'static str> {
    let all = [
        (true, "etcd", "etcd"),
        (true, "kube-apiserver", "apiserver"),
        (true, "kubectl", "kubectl"),
        (options.scheduler, "kube-scheduler", "scheduler"),
        (options.controller_manager, "kube-controller-manager", "controller-manager"),
    ];
    let absent = |(wanted, file, _): &(bool, &str, &str)| *wanted && !program(file).is_file();
    all.into_iter().filter(absent).map(|(_, _, name)| name).collect()
}

fn program(name: &str) -> PathBuf {
    crate::lab().join("bin").join(name)
}

/// The running control plane. Dropping it removes everything.
#[derive(Debug)]
pub struct ControlPlane {
    dir: PathBuf,
    options: Options,
    ports: Ports,
    authority: Authority,
    api: Api,
    running: Mutex<BTreeMap<Part, Child>>,
    closed: bool,
}

#[derive(Clone, Copy, Debug)]
struct Ports {
    etcd: u16,
    peer: u16,
    api: u16,
}

impl ControlPlane {
    /// Starts it and waits until the API server is ready, which takes about 6 s; the other parts are started and not waited for.
    ///
    /// Anonymous requests are refused, and authorization is `Node,RBAC`. Besides what the API server makes by itself there are a
    /// bootstrap token, the bindings that let a node ask for certificates with it, and the one that lets the API server use a kubelet.
    ///
    /// # Errors
    /// When a program is missing, or with the end of the log of a part that does not come up.
    pub fn start(kind: &str, options: Options) -> Result<Self> {
        let missing = missing(&options);
        if !missing.is_empty() {
            bail!("not there: run `lab/build-reference {}`", missing.join(" "));
        }
        let mut number = 0;
        let dir = loop {
            match record::claim(&format!("rubelet-plane-{number}"), kind, None)? {
                Some(dir) => break dir,
                None if number < 999 => number += 1,
                None => bail!("1000 control planes are there: `cargo xtask tidy` removes what earlier runs left"),
            }
        };
        match Self::prepare(&dir, options) {
            Ok(plane) => plane.run().map(|()| plane),
            Err(e) => {
                let _ = fs::remove_dir_all(&dir);
                Err(e)
            }
        }
    }

    fn prepare(dir: &Path, options: Options) -> Result<Self> {
        for sub in ["pki", "etcd-pki", "kubeconfigs", "home"] {
            fs::create_dir(dir.join(sub)).with_context(|| format!("cannot make {}/{sub}", dir.display()))?;
        }
        let [etcd, peer, api] = ports()?;
        let authority = Authority::new(&dir.join("pki"), "ca")?;
        let names = [HOST, "localhost", SERVICE_ADDRESS, "kubernetes", "kubernetes.default", "kubernetes.default.svc"];
        authority.issue("kube-apiserver", "kube-apiserver", None, &names)?;
        authority.issue("kubelet-client", objects::KUBELET_CLIENT, None, &[])?;
        authority.issue("front-proxy-client", FRONT_PROXY, None, &[])?;
        let admin = authority.issue("admin", "kubernetes-admin", Some("system:masters"), &[])?;
        pki::key(&dir.join("pki"), "service-accounts")?;
        // An authority of its own: whoever has a certificate of the cluster may not read the store behind it.
        let store = Authority::new(&dir.join("etcd-pki"), "ca")?;
        store.issue("etcd", "etcd", None, &[HOST])?;
        let api_address = SocketAddr::from((Ipv4Addr::LOCALHOST, api));
        let client = Api::new(api_address, &authority.own.certificate, &admin)?;
        let plane = Self {
            dir: dir.to_owned(),
            options,
            ports: Ports { etcd, peer, api },
            authority,
            api: client,
            running: Mutex::default(),
            closed: false,
        };
        plane.write_kubeconfig("admin", &user(&admin))?;
        for (name, user_name) in
            [("scheduler", "system:kube-scheduler"), ("controller-manager", "system:kube-controller-manager")]
        {
            let pair = plane.authority.issue(name, user_name, None, &[])?;
            plane.write_kubeconfig(name, &user(&pair))?;
        }
        plane.write_kubeconfig("bootstrap", &json!({"token": objects::BOOTSTRAP_TOKEN}))?;
        Ok(plane)
    }

    fn run(&self) -> Result<()> {
        self.start_part(Part::Etcd, &self.etcd_flags())?;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, self.ports.etcd));
        self.wait(Part::Etcd, || TcpStream::connect_timeout(&address, Duration::from_secs(1)).is_ok())?;
        self.start_api_server()?;
        if self.options.controller_manager {
            self.start_part(Part::ControllerManager, &self.controller_manager_flags())?;
        }
        if self.options.scheduler {
            self.start_part(Part::Scheduler, &self.scheduler_flags())?;
        }
        objects::create(&self.api)
    }

    /// Its directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The API server's URL.
    pub fn url(&self) -> String {
        format!("https://{HOST}:{}", self.ports.api)
    }

    /// The certificate of the authority that signed everything: what a kubelet takes as `clientCAFile`.
    pub fn authority(&self) -> &Path {
        &self.authority.own.certificate
    }

    /// That authority, for certificates of all kinds.
    pub fn signer(&self) -> &Authority {
        &self.authority
    }

    /// The log of a part, over all its starts.
    pub fn log(&self, part: Part) -> PathBuf {
        self.dir.join(format!("{}.log", part.program()))
    }

    /// The API server, as a member of `system:masters`.
    pub fn api(&self) -> &Api {
        &self.api
    }

    /// The API server as another user of another group.
    ///
    /// # Errors
    /// When the certificate cannot be written.
    pub fn api_as(&self, user: &str, group: Option<&str>) -> Result<Api> {
        let pair = self.authority.issue(&file_name(user), user, group, &[])?;
        Api::new(SocketAddr::from((Ipv4Addr::LOCALHOST, self.ports.api)), self.authority(), &pair)
    }

    /// The kubeconfig of a member of `system:masters`.
    pub fn admin_kubeconfig(&self) -> PathBuf {
        self.kubeconfig("admin")
    }

    /// A kubeconfig with a bootstrap token, by which a kubelet (`--bootstrap-kubeconfig`) asks for its certificate. The controller
    /// manager approves and signs it.
    pub fn bootstrap_kubeconfig(&self) -> PathBuf {
        self.kubeconfig("bootstrap")
    }

    /// The flags by which a kubelet becomes the node `name` of this cluster; `address` as [`crate::Stage::address`].
    ///
    /// # Errors
    /// When its kubeconfig cannot be written.
    pub fn node_flags(&self, name: &str, address: &str) -> Result<Vec<String>> {
        Ok(vec![
            format!("--kubeconfig={}", self.node_kubeconfig(name)?.display()),
            format!("--hostname-override={name}"),
            format!("--node-ip={address}"),
        ])
    }

    /// A kubeconfig for `system:node:NAME` of the group `system:nodes`, with a new certificate.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn node_kubeconfig(&self, name: &str) -> Result<PathBuf> {
        let pair = self.node_pair(name)?;
        self.write_kubeconfig(&format!("node-{}", file_name(name)), &user(&pair))
    }

    /// A kubeconfig for the node `name` that leads to another address, as that of a [`Proxy`].
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn node_kubeconfig_by(&self, name: &str, address: SocketAddr) -> Result<PathBuf> {
        let pair = self.node_pair(name)?;
        let file = format!("node-{}-{}", file_name(name), address.port());
        self.kubeconfig_of(&file, &format!("https://{address}"), self.authority(), &user(&pair))
    }

    fn node_pair(&self, name: &str) -> Result<Pair> {
        let file = format!("node-{}", file_name(name));
        self.authority.issue(&file, &format!("system:node:{name}"), Some("system:nodes"), &[])
    }

    /// A proxy before the API server, on a port that stays free while it does not listen.
    ///
    /// # Errors
    /// When there is no free port.
    pub fn proxy(&self) -> Result<Proxy> {
        let [port] = ports()?;
        Proxy::start(port, SocketAddr::from((Ipv4Addr::LOCALHOST, self.ports.api)))
    }

    /// A gate before the API server, through which the node `name` goes.
    ///
    /// # Errors
    /// When there is no free port or a file cannot be written.
    pub fn gate(&self, name: &str) -> Result<Gate> {
        let [port] = ports()?;
        let own = self.authority.issue("gate", "gate", None, &[HOST])?;
        let target = SocketAddr::from((Ipv4Addr::LOCALHOST, self.ports.api));
        Gate::start(port, target, self.authority(), &own, &self.node_pair(name)?)
    }

    fn kubeconfig(&self, name: &str) -> PathBuf {
        self.dir.join(format!("kubeconfigs/{name}.yaml"))
    }

    fn write_kubeconfig(&self, name: &str, user: &Value) -> Result<PathBuf> {
        self.kubeconfig_of(name, &self.url(), self.authority(), user)
    }

    /// A kubeconfig of this name (as a file) in which everything may be wrong: the server's URL, the authority that its certificate is
    /// checked with, the user as it stands there (`{"tokenFile": …}`). JSON, which is YAML too.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn kubeconfig_of(&self, name: &str, server: &str, authority: &Path, user: &Value) -> Result<PathBuf> {
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "rubelet",
            "clusters": [{"name": "rubelet", "cluster": {"server": server, "certificate-authority": authority}}],
            "contexts": [{"name": "rubelet", "context": {"cluster": "rubelet", "user": name}}],
            "users": [{"name": name, "user": user}],
        });
        let file = self.kubeconfig(name);
        pki::secret(&file, &serde_json::to_string_pretty(&config)?)?;
        Ok(file)
    }

    /// Runs kubectl as a member of `system:masters`; its caches are kept in the directory.
    ///
    /// # Errors
    /// When it cannot be started; how it ended is in the output.
    pub fn kubectl<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Result<Output> {
        self.kubectl_command().args(arguments).output().context("cannot start kubectl")
    }

    /// A kubectl that is yet to be given its arguments.
    pub fn kubectl_command(&self) -> Command {
        let mut command = Command::new(program("kubectl"));
        command
            .env("KUBECONFIG", self.admin_kubeconfig())
            .env("HOME", self.dir.join("home"))
            .env_remove("KUBECACHEDIR")
            .stdin(Stdio::null());
        command
    }

    /// Makes a namespace, if it is not there, and waits until pods can be made in it: its default service account and the certificate
    /// of the authority are there.
    ///
    /// # Errors
    /// When the API server refuses, or the controller manager does not make them within 30 s.
    pub fn namespace(&self, name: &str) -> Result<()> {
        if self.api.find(&format!("/api/v1/namespaces/{name}"))?.is_none() {
            self.api.create("/api/v1/namespaces", &json!({"metadata": {"name": name}}))?;
        }
        if !self.options.controller_manager {
            objects::fill_namespace(&self.api, name, &fs::read_to_string(self.authority())?)?;
        }
        self.wait_service_account(name)
    }

    /// Waits until the default service account of a namespace is there, and the certificate that its pods get.
    ///
    /// # Errors
    /// When they are not there after 30 s.
    pub fn wait_service_account(&self, namespace: &str) -> Result<()> {
        let paths = ["serviceaccounts/default", "configmaps/kube-root-ca.crt"]
            .map(|p| format!("/api/v1/namespaces/{namespace}/{p}"));
        let there = || paths.iter().all(|p| matches!(self.api.find(p), Ok(Some(_))));
        if poll(Duration::from_secs(30), there) {
            return Ok(());
        }
        let log = crate::tail(&self.log(Part::ControllerManager), 10);
        bail!("namespace {namespace} has no default service account after 30 s; the controller manager's log:\n{log}")
    }

    /// Kills the API server: connections break, and the port is closed. Fine when it does not run.
    pub fn stop_api_server(&self) {
        self.stop(Part::ApiServer);
    }

    /// Starts the API server again, on the same port with the same data, and waits until it is ready.
    ///
    /// # Errors
    /// With the end of its log when it does not come up.
    pub fn start_api_server(&self) -> Result<()> {
        self.start_part(Part::ApiServer, &self.api_server_flags())?;
        self.wait(Part::ApiServer, || self.api.request("GET", "/readyz", "", None).is_ok_and(|(code, _)| code == 200))
    }

    /// Kills a part; fine when it does not run.
    pub fn stop(&self, part: Part) {
        if let Some(mut child) = self.running().remove(&part) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Removes everything; what is still there afterwards is the error.
    ///
    /// # Errors
    /// With what could not be removed.
    pub fn close(mut self) -> Result<()> {
        self.wipe()
    }

    fn wipe(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.closed, true) {
            return Ok(());
        }
        for part in [Part::Scheduler, Part::ControllerManager, Part::ApiServer, Part::Etcd] {
            self.stop(part);
        }
        record::wipe_control_plane(&self.dir)
    }

    fn running(&self) -> MutexGuard<'_, BTreeMap<Part, Child>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start_part(&self, part: Part, flags: &[String]) -> Result<()> {
        let mut running = self.running();
        if let Some(child) = running.get_mut(&part)
            && matches!(child.try_wait(), Ok(None))
        {
            return Ok(());
        }
        let file = self.log(part);
        let log = fs::OpenOptions::new().create(true).append(true).open(&file);
        let log = log.with_context(|| format!("cannot write {}", file.display()))?;
        let mut command = crate::bound(&program(part.program()));
        command.args(flags).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = crate::spawn(command).with_context(|| format!("cannot start {}", part.program()))?;
        running.insert(part, child);
        Ok(())
    }

    fn wait(&self, part: Part, mut ready: impl FnMut() -> bool) -> Result<()> {
        let mut ended = None;
        let up = poll(PATIENCE, || {
            ended = self.running().get_mut(&part).and_then(|c| c.try_wait().ok().flatten());
            ended.is_some() || ready()
        });
        if up && ended.is_none() {
            return Ok(());
        }
        let how = ended.map_or(format!("is not ready after {} s", PATIENCE.as_secs()), |s| format!("ended ({s})"));
        bail!("{} {how}; the end of its log:\n{}", part.program(), crate::tail(&self.log(part), 15))
    }

    fn etcd_flags(&self) -> Vec<String> {
        let pki = self.dir.join("etcd-pki");
        let (client, peer) =
            (format!("https://{HOST}:{}", self.ports.etcd), format!("https://{HOST}:{}", self.ports.peer));
        let mut flags = vec![
            format!("--data-dir={}", self.dir.join("etcd").display()),
            format!("--listen-client-urls={client}"),
            format!("--advertise-client-urls={client}"),
            format!("--listen-peer-urls={peer}"),
            format!("--initial-advertise-peer-urls={peer}"),
            format!("--initial-cluster=default={peer}"),
            // What a power cut would lose is not worth keeping.
            "--unsafe-no-fsync".to_owned(),
            "--log-level=warn".to_owned(),
        ];
        for prefix in ["", "peer-"] {
            flags.extend([
                format!("--{prefix}cert-file={}", pki.join("etcd.crt").display()),
                format!("--{prefix}key-file={}", pki.join("etcd.key").display()),
                format!("--{prefix}trusted-ca-file={}", pki.join("ca.crt").display()),
                format!("--{prefix}client-cert-auth"),
            ]);
        }
        flags
    }

    fn api_server_flags(&self) -> Vec<String> {
        let (pki, store) =
            (self.dir.join("pki").display().to_string(), self.dir.join("etcd-pki").display().to_string());
        let mut flags = vec![
            format!("--bind-address={HOST}"),
            format!("--advertise-address={HOST}"),
            format!("--secure-port={}", self.ports.api),
            format!("--etcd-servers=https://{HOST}:{}", self.ports.etcd),
            format!("--etcd-cafile={store}/ca.crt"),
            format!("--etcd-certfile={store}/etcd.crt"),
            format!("--etcd-keyfile={store}/etcd.key"),
            format!("--cert-dir={pki}"),
            format!("--tls-cert-file={pki}/kube-apiserver.crt"),
            format!("--tls-private-key-file={pki}/kube-apiserver.key"),
            format!("--client-ca-file={pki}/ca.crt"),
            format!("--kubelet-client-certificate={pki}/kubelet-client.crt"),
            format!("--kubelet-client-key={pki}/kubelet-client.key"),
            "--kubelet-preferred-address-types=InternalIP,Hostname".to_owned(),
            format!("--proxy-client-cert-file={pki}/front-proxy-client.crt"),
            format!("--proxy-client-key-file={pki}/front-proxy-client.key"),
            format!("--requestheader-client-ca-file={pki}/ca.crt"),
            format!("--requestheader-allowed-names={FRONT_PROXY}"),
            "--requestheader-username-headers=X-Remote-User".to_owned(),
            "--requestheader-group-headers=X-Remote-Group".to_owned(),
            "--requestheader-extra-headers-prefix=X-Remote-Extra-".to_owned(),
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local".to_owned(),
            format!("--service-account-key-file={pki}/service-accounts.pub"),
            format!("--service-account-signing-key-file={pki}/service-accounts.key"),
            format!("--service-cluster-ip-range={SERVICES}"),
            // The endpoints of the Service `kubernetes` may not be loopback addresses.
            "--endpoint-reconciler-type=none".to_owned(),
            "--anonymous-auth=false".to_owned(),
            "--authorization-mode=Node,RBAC".to_owned(),
            "--enable-admission-plugins=NodeRestriction".to_owned(),
            "--enable-bootstrap-token-auth".to_owned(),
            "--allow-privileged".to_owned(),
        ];
        flags.extend(self.options.api_server_flags.iter().cloned());
        flags
    }

    fn controller_manager_flags(&self) -> Vec<String> {
        let pki = self.dir.join("pki").display().to_string();
        vec![
            format!("--kubeconfig={}", self.kubeconfig("controller-manager").display()),
            format!("--root-ca-file={pki}/ca.crt"),
            format!("--cluster-signing-cert-file={pki}/ca.crt"),
            format!("--cluster-signing-key-file={pki}/ca.key"),
            format!("--service-account-private-key-file={pki}/service-accounts.key"),
            format!("--service-cluster-ip-range={SERVICES}"),
            // Each controller as a service account of its own, with the rights that RBAC has for it.
            "--use-service-account-credentials".to_owned(),
            "--leader-elect=false".to_owned(),
            "--secure-port=0".to_owned(),
        ]
    }

    fn scheduler_flags(&self) -> Vec<String> {
        vec![
            format!("--kubeconfig={}", self.kubeconfig("scheduler").display()),
            "--leader-elect=false".to_owned(),
            "--secure-port=0".to_owned(),
        ]
    }
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        if let Err(e) = self.wipe() {
            eprintln!("rig: {} is not clean: {e:#}", self.dir.display());
        }
    }
}

/// True when this Node object says Ready.
pub fn is_ready(node: &Value) -> bool {
    let conditions = node["status"]["conditions"].as_array();
    conditions.into_iter().flatten().any(|c| c["type"] == "Ready" && c["status"] == "True")
}

/// The fields of a KubeletConfiguration by which a kubelet lets this control plane in: certificates of its authority, tokens and rights
/// as the API server says. `address` is where it serves, as [`crate::Stage::address`].
pub fn kubelet_config(plane: &ControlPlane, address: &str) -> Value {
    json!({
        "address": address, "clusterDNS": [], "clusterDomain": "cluster.local",
        "authentication": {
            "anonymous": {"enabled": false}, "webhook": {"enabled": true}, "x509": {"clientCAFile": plane.authority()},
        },
        "authorization": {"mode": "Webhook"},
        // Sooner than by default: what changes in a mounted configMap or secret arrives with the next sync of the pod.
        "syncFrequency": "10s", "nodeStatusUpdateFrequency": "5s",
    })
}

fn user(pair: &Pair) -> Value {
    json!({"client-certificate": pair.certificate, "client-key": pair.key})
}

/// `system:node:a` as a name for files.
fn file_name(user: &str) -> String {
    user.chars().map(|c| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' }).collect()
}

/// As [`crate::poll`], at a pace for requests.
fn poll(limit: Duration, mut done: impl FnMut() -> bool) -> bool {
    crate::poll(limit, || {
        let found = done();
        if !found {
            std::thread::sleep(Duration::from_millis(80));
        }
        found
    })
}

/// Ports that stay free while nothing listens on them, for an API server that comes back: below those that the kernel gives to outgoing
/// connections.
fn ports<const N: usize>() -> Result<[u16; N]> {
    let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let low: u16 = range.split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(32768);
    let (first, last) = if low > 21000 { (20000, low - 1) } else { (low, 65535) };
    let count = u32::from(last - first);
    // Two control planes that start at the same time begin at different ports.
    let begin = std::process::id().wrapping_mul(97) % count;
    let mut held = Vec::new();
    let mut found = [0; N];
    for offset in 0..count {
        if held.len() == N {
            return Ok(found);
        }
        let port = u16::try_from(u32::from(first) + (begin + offset) % count).unwrap_or(first);
        if let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
            found[held.len()] = port;
            held.push(listener);
        }
    }
    bail!("no free ports from {first} to {last}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_below_those_of_outgoing_connections() {
        let [a, b, c] = ports().unwrap();
        assert!(a != b && b != c && a != c);
        assert!([a, b, c].iter().all(|p| (20000..32768).contains(p)), "{a} {b} {c}");
    }

    #[test]
    fn users_as_file_names() {
        assert_eq!(file_name("system:node:a.b"), "system-node-a.b");
    }
}
