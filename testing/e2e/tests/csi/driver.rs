//! The test driver as a process, and the objects around it.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use e2e::cluster::Cluster;
use e2e::{NODE, seconds, wait_until};
use serde_json::{Value, json};

/// A running driver. It ends with this value.
pub(crate) struct Driver {
    pub(crate) name: String,
    pub(crate) data: PathBuf,
    registry: PathBuf,
    arguments: Vec<String>,
    child: Option<Child>,
}

impl Driver {
    /// Starts it and makes its CSIDriver object.
    pub(crate) fn start(cluster: &Cluster, name: &str, spec: &Value, arguments: &[&str]) -> Self {
        let path = format!("/apis/storage.k8s.io/v1/csidrivers/{name}");
        if cluster.api().find(&path).unwrap().is_some() {
            // Of a test before; most of its fields cannot be changed.
            cluster.api().delete(&path, &Value::Null).unwrap();
        }
        let object = json!({"metadata": {"name": name}, "spec": spec});
        cluster.api().create("/apis/storage.k8s.io/v1/csidrivers", &object).unwrap();
        let data = cluster.node.dir().join(name);
        fs::create_dir_all(&data).unwrap();
        let registry = cluster.node.root().join("plugins_registry");
        let arguments = arguments.iter().map(ToString::to_string).collect();
        let mut driver = Self { name: name.to_owned(), data, registry, arguments, child: None };
        driver.run();
        driver
    }

    /// Starts the process (again).
    pub(crate) fn run(&mut self) {
        self.kill();
        let here = std::env::current_exe().unwrap();
        let program = here.parent().and_then(|p| p.parent()).unwrap().join("csi-driver");
        let child = Command::new(&program)
            .args(["--name", &self.name, "--registry"])
            .arg(&self.registry)
            .arg("--data")
            .arg(&self.data)
            .args(&self.arguments)
            .stdin(Stdio::null())
            .spawn();
        self.child = Some(child.unwrap_or_else(|e| panic!("{}: {e} (cargo build -p csi-driver)", program.display())));
    }

    /// `kill -9`.
    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// True once the process ended by itself.
    pub(crate) fn ended(&mut self) -> bool {
        self.child.as_mut().is_none_or(|c| !matches!(c.try_wait(), Ok(None)))
    }

    /// Ends it and takes its sockets away, as an uninstalled driver leaves the node.
    pub(crate) fn uninstall(&mut self) {
        self.kill();
        let _ = fs::remove_file(self.registry.join(format!("{}-reg.sock", self.name)));
    }

    /// What goes wrong from now on.
    pub(crate) fn faults(&self, faults: &Value) {
        fs::write(self.data.join(".faults"), faults.to_string()).unwrap();
        fs::rename(self.data.join(".faults"), self.data.join("faults.json")).unwrap();
    }

    /// The calls so far: method, request, answer.
    pub(crate) fn calls(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.data.join("calls.jsonl")).unwrap_or_default();
        text.lines().filter_map(|l| serde_json::from_str(l).ok()).collect()
    }

    /// The answered calls of one method about one volume.
    pub(crate) fn answered(&self, method: &str, handle: &str) -> Vec<Value> {
        self.calls().into_iter().filter(|c| c["method"] == method && c["request"]["volume_id"] == handle).collect()
    }

    /// Waits until the node's CSINode names it.
    pub(crate) fn wait_registered(&self, cluster: &Cluster) -> Value {
        wait_until(&format!("{} is in the CSINode", self.name), seconds(60), || {
            let node = cluster.api().find(&format!("/apis/storage.k8s.io/v1/csinodes/{NODE}")).ok()??;
            let drivers = node["spec"]["drivers"].as_array()?;
            drivers.iter().find(|d| d["name"] == self.name.as_str()).cloned()
        })
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.uninstall();
    }
}

/// A volume of the driver and a claim that is bound to it. `more` is merged into the volume's spec.
pub(crate) fn claim(cluster: &Cluster, driver: &str, name: &str, more: &Value) -> Value {
    let mut of = json!({"csi": {"driver": driver, "volumeHandle": format!("{name}-handle"), "fsType": "ext4",
        "volumeAttributes": {"color": "blue"}}});
    for (key, value) in more.as_object().into_iter().flatten() {
        match (key.as_str(), value.as_object()) {
            ("csi", Some(fields)) => fields.iter().for_each(|(k, v)| of["csi"][k] = v.clone()),
            _ => of[key] = value.clone(),
        }
    }
    claim_of(cluster, name, &of)
}

/// A volume `pv-NAME` and a claim that is bound to it. `of`: what it is, and what else its spec says.
pub(crate) fn claim_of(cluster: &Cluster, name: &str, of: &Value) -> Value {
    let mut spec = json!({
        "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "persistentVolumeReclaimPolicy": "Retain",
        "storageClassName": "", "claimRef": {"namespace": "default", "name": name},
    });
    if of.get("local").is_some() {
        // A local volume must say which nodes have it.
        spec["nodeAffinity"] = json!({"required": {"nodeSelectorTerms": [
            {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "Exists"}]}]}});
    }
    for (key, value) in of.as_object().into_iter().flatten() {
        spec[key] = value.clone();
    }
    let (modes, mode) = (spec["accessModes"].clone(), spec["volumeMode"].clone());
    cluster
        .api()
        .create("/api/v1/persistentvolumes", &json!({"metadata": {"name": format!("pv-{name}")}, "spec": spec}))
        .unwrap();
    cluster.create(
        "persistentvolumeclaims",
        &json!({"metadata": {"name": name}, "spec": {"accessModes": modes, "volumeMode": mode, "storageClassName": "",
            "volumeName": format!("pv-{name}"), "resources": {"requests": {"storage": "1Gi"}}}}),
    );
    wait_until(&format!("the claim {name} is bound"), seconds(60), || {
        let path = format!("/api/v1/namespaces/default/persistentvolumeclaims/{name}");
        cluster.api().find(&path).ok()?.filter(|c| c["status"]["phase"] == "Bound")
    })
}

/// Answers the attach controller as an external-attacher does: every VolumeAttachment becomes attached, every one that is to go goes.
pub(crate) fn attach(cluster: &Cluster) -> Vec<String> {
    let path = "/apis/storage.k8s.io/v1/volumeattachments";
    let mut names = Vec::new();
    for a in cluster.api().list(path).unwrap() {
        let name = a["metadata"]["name"].as_str().unwrap().to_owned();
        if a["metadata"]["deletionTimestamp"].is_null() && a["status"]["attached"] != true {
            let status = json!({"status": {"attached": true, "attachmentMetadata": {"device": "/dev/fake"}}});
            let _ = cluster.api().merge(&format!("{path}/{name}/status"), &status);
        }
        names.push(name);
    }
    names
}

/// Waits until the pod runs, and attaches meanwhile what it needs.
pub(crate) fn run_attached(cluster: &Cluster, name: &str) -> Value {
    wait_until(&format!("{name} has what it needs attached"), seconds(60), || {
        attach(cluster);
        cluster.pod(name).filter(|p| p["status"]["phase"] == "Running").map(|_| ())
    });
    cluster.wait_running(name)
}
