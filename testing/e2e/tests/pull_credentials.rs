//! The node's own pull credentials: docker's files and credential provider plugins, against a registry that wants a password.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use e2e::{Node, Options, Registry, Withdrawn, container, pod, seconds, wait_until, with};
use serde_json::{Value, json};

const IMAGE: &str = "lab.test/nonroot:1";

/// A node without the image, and a registry that gives it to `me` only.
fn closed(node: &Node) -> (Registry, Withdrawn<'_>) {
    let withdrawn = Withdrawn::new(node, IMAGE, "nonroot");
    let registry = Registry::start(node, "lab.test", &["nonroot"], &["--user", "me:right", "--private", "nonroot"]);
    (registry, withdrawn)
}

fn private(name: &str) -> Value {
    pod(name, [with(container("c", "sleep 1000000"), json!({"image": IMAGE}))])
}

/// What is recorded of the image.
fn recorded(node: &Node) -> Vec<Value> {
    let dir = node.root().join("image_manager/pulled");
    let read = |path: PathBuf| serde_json::from_slice::<Value>(&fs::read(path).unwrap()).unwrap();
    let all = fs::read_dir(dir).unwrap().map(|entry| read(entry.unwrap().path()));
    all.filter_map(|r| r["credentialMapping"]["lab.test/nonroot"].as_object().map(|c| json!(c))).collect()
}

#[test]
#[ignore = "needs containerd"]
fn the_nodes_file_is_good_for_every_pod() {
    let mut node = Node::prepare(Options::default());
    let login = json!({"auths": {"lab.test": {"username": "me", "password": "right"}}});
    fs::write(node.root().join("config.json"), login.to_string()).unwrap();
    node.run();
    let _closed = closed(&node);
    node.write("a.yaml", &private("filed"));
    node.wait_running("filed");
    assert_eq!(recorded(&node), [json!({"nodePodsAccessible": true})]);
    assert_eq!(fs::read_dir(node.root().join("image_manager/pulling")).unwrap().count(), 0);
}

fn plugin(dir: &Path, script: &str) -> [String; 2] {
    let (bin, config) = (dir.join("bin"), dir.join("providers.yaml"));
    fs::create_dir_all(&bin).unwrap();
    fs::write(bin.join("giver"), format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(bin.join("giver"), fs::Permissions::from_mode(0o755)).unwrap();
    let providers = json!({"kind": "CredentialProviderConfig", "apiVersion": "kubelet.config.k8s.io/v1", "providers": [{
        "name": "giver", "apiVersion": "credentialprovider.kubelet.k8s.io/v1", "matchImages": ["*.test"], "defaultCacheDuration": "1h",
        "args": ["give"], "env": [{"name": "WHO", "value": "me"}],
    }]});
    fs::write(&config, providers.to_string()).unwrap();
    [
        format!("--image-credential-provider-config={}", config.display()),
        format!("--image-credential-provider-bin-dir={}", bin.display()),
    ]
}

#[test]
#[ignore = "needs containerd"]
fn a_plugin_is_asked_for_credentials() {
    let dir = std::env::temp_dir().join(format!("rubelet-plugin-{}", std::process::id()));
    let asked = dir.join("asked");
    let answer = r#"{"kind":"CredentialProviderResponse","apiVersion":"credentialprovider.kubelet.k8s.io/v1","cacheKeyType":"Registry","auth":{"lab.test":{"username":"'$WHO'","password":"right"}}}"#;
    let flags = plugin(&dir, &format!("read request; echo \"$1 $request\" >> {}\necho '{answer}'", asked.display()));
    let mut options = Options::default();
    for flag in &flags {
        options = options.flag(flag);
    }
    let node = Node::with(options);
    let closed = closed(&node);
    node.write("a.yaml", &private("plugged"));
    node.write("b.yaml", &private("plugged-too"));
    node.wait_running("plugged");
    node.wait_running("plugged-too");
    let request = r#"give {"kind":"CredentialProviderRequest","apiVersion":"credentialprovider.kubelet.k8s.io/v1","image":"lab.test/nonroot"}"#;
    assert_eq!(fs::read_to_string(&asked).unwrap(), format!("{request}\n"), "asked once, then kept");
    assert_eq!(recorded(&node), [json!({"nodePodsAccessible": true})]);
    drop(closed);
    drop(node);
    fs::remove_dir_all(dir).unwrap();
}

#[test]
#[ignore = "needs containerd"]
fn what_was_pulled_is_checked_again_by_policy() {
    let node = Node::with(Options::default().config(json!({"imagePullCredentialsVerificationPolicy": "AlwaysVerify"})));
    // The runtime has it, but nobody has ever shown that he may use it.
    let mut manifest = private("unproven");
    manifest["spec"]["containers"][0]["imagePullPolicy"] = json!("Never");
    node.write("a.yaml", &manifest);
    wait_until("it is as if the image was not there", seconds(30), || {
        let pod = node.pod("unproven")?;
        let waiting = &pod["status"]["containerStatuses"][0]["state"]["waiting"];
        (waiting["reason"] == "ErrImageNeverPull").then_some(())
    });
}
