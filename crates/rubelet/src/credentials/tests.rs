//! Files of docker's formats, and plugins that are shell scripts.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicUsize, Ordering};

use model::api::{ConfigMap, PersistentVolume, PersistentVolumeClaim, Pod, Secret, ServiceAccount};
use model::pod::{PodSource, PodUid};
use pod::objects::{ObjectResult, Token, TrustBundles};
use pod::registry::PodEntry;
use serde_json::json;

use super::config::TokenAttributes;
use super::*;

fn pod(account: Option<&str>) -> DesiredPod {
    let object: Pod = serde_json::from_value(json!({
        "metadata": {"name": "p", "namespace": "ns", "uid": "u"}, "spec": {"serviceAccountName": account, "containers": []},
    }))
    .unwrap();
    DesiredPod::new(object, PodSource::Api).unwrap()
}

fn names(found: &[Credential]) -> String {
    found.iter().map(|c| c.login.username.as_str()).collect::<Vec<_>>().join(" ")
}

/// One service account, and tokens that are numbered.
#[derive(Default)]
struct Account {
    tokens: AtomicUsize,
}

#[async_trait]
impl PodObjects for Account {
    fn follow(&self, _: &DesiredPod, _: &Arc<PodEntry>) {}
    fn forget(&self, _: &PodUid) {}
    async fn config_map(&self, _: &str, _: &str) -> ObjectResult<Arc<ConfigMap>> {
        unreachable!()
    }
    async fn secret(&self, _: &str, _: &str) -> ObjectResult<Arc<Secret>> {
        unreachable!()
    }
    async fn token(&self, _: &DesiredPod, audience: &str, seconds: Option<i64>) -> ObjectResult<Token> {
        assert_eq!((audience, seconds), ("reg", None));
        let n = self.tokens.fetch_add(1, Ordering::SeqCst);
        Ok(Token { token: format!("t{n}"), renew_at: jiff::Timestamp::MAX, ends: jiff::Timestamp::MAX })
    }
    async fn service_account(&self, _: &str, name: &str) -> ObjectResult<ServiceAccount> {
        let account = json!({"metadata": {"name": name, "uid": "sa-uid", "annotations": {"id": "7", "more": "m"}}});
        Ok(serde_json::from_value(account).unwrap())
    }
    async fn trust_anchors(&self, _: &TrustBundles, _: bool) -> ObjectResult<Vec<u8>> {
        unreachable!()
    }
    async fn claim(&self, _: &str, _: &str) -> ObjectResult<PersistentVolumeClaim> {
        unreachable!()
    }
    async fn volume(&self, _: &str) -> ObjectResult<PersistentVolume> {
        unreachable!()
    }
    async fn runtime_handler(&self, _: &str) -> ObjectResult<String> {
        unreachable!()
    }
    async fn service_variables(&self, _: &str, _: bool, _: bool) -> Option<BTreeMap<String, String>> {
        unreachable!()
    }
}

struct Lab {
    dir: tempfile::TempDir,
}

impl Lab {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    fn places(&self) -> Places {
        let at = |name: &str| self.dir.path().join(name);
        Places { config_json: vec![at("root"), at("home")], dockercfg: vec![at("root"), at("old")] }
    }

    fn put(&self, path: &str, content: &str) {
        let path = self.dir.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }

    /// A plugin whose runs are counted in `runs`.
    fn plugin(&self, script: &str) -> Provider {
        let path = self.dir.path().join("plug");
        let runs = self.dir.path().join("runs");
        std::fs::write(&path, format!("#!/bin/sh\necho x >> {}\n{script}\n", runs.display())).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        Provider {
            name: "plug".into(),
            match_images: vec!["*.test".into(), "reg.test:5000/team".into()],
            default_cache_duration: Duration::from_secs(3600),
            api_version: "credentialprovider.kubelet.k8s.io/v1".into(),
            args: vec!["an-arg".into()],
            env: [("FROM_CONFIG".to_owned(), "set".to_owned())].into(),
            token: None,
        }
    }

    fn keyring(&self, provider: Provider) -> NodeKeyring {
        let objects: Arc<dyn PodObjects> = Arc::new(Account::default());
        NodeKeyring::new(self.places(), vec![provider], self.dir.path(), &objects, &Arc::new(Metrics::new().unwrap()))
    }

    fn runs(&self) -> usize {
        std::fs::read_to_string(self.dir.path().join("runs")).map_or(0, |text| text.lines().count())
    }
}

fn answer(kind: &str, extra: &str) -> String {
    format!(
        r#"echo '{{"kind":"CredentialProviderResponse","apiVersion":"credentialprovider.kubelet.k8s.io/v1","cacheKeyType":"{kind}"{extra},"auth":{{"*.test":{{"username":"plugged","password":"p"}}}}}}'"#
    )
}

#[tokio::test]
async fn files_in_their_order() {
    let lab = Lab::new();
    let login = |user: &str| format!(r#"{{"auths":{{"a.test":{{"username":"{user}","password":"p"}}}}}}"#);
    lab.put("root/.dockercfg", r#"{"a.test":{"username":"cfg","password":"p"}}"#);
    assert_eq!(lab.places().read()["a.test"].username, "cfg");
    lab.put("home/config.json", &login("home"));
    assert_eq!(lab.places().read()["a.test"].username, "home", "config.json goes before .dockercfg");
    lab.put("root/config.json", "{");
    assert_eq!(lab.places().read()["a.test"].username, "home", "what cannot be read is passed over");
    lab.put("root/config.json", &login("root"));
    assert_eq!(lab.places().read()["a.test"].username, "root");
    let objects: Arc<dyn PodObjects> = Arc::new(Account::default());
    let keyring =
        NodeKeyring::new(lab.places(), Vec::new(), lab.dir.path(), &objects, &Arc::new(Metrics::new().unwrap()));
    let found = keyring.lookup(&pod(None), "a.test/x").await;
    assert_eq!((names(&found).as_str(), &found[0].origin), ("root", &Origin::Node));
    assert!(keyring.lookup(&pod(None), "b.test/x").await.is_empty());
}

#[tokio::test]
async fn a_plugin_is_asked_and_its_answer_kept() {
    for (kind, extra, runs) in [
        ("Image", "", 2),
        ("Registry", "", 1),
        ("Global", r#","cacheDuration":"10m""#, 1),
        ("Image", r#","cacheDuration":"0s""#, 3),
    ] {
        let lab = Lab::new();
        let ask = r#"read request; case "$1 $FROM_CONFIG $request" in 'an-arg set {"kind":"CredentialProviderRequest","apiVersion":"credentialprovider.kubelet.k8s.io/v1","image":"a.test/'?'"}') ;; *) echo "asked $request" >&2; exit 3;; esac"#;
        let keyring = lab.keyring(lab.plugin(&format!("{ask}\n{}", answer(kind, extra))));
        for image in ["a.test/x", "a.test/y", "a.test/x"] {
            assert_eq!(names(&keyring.lookup(&pod(None), image).await), "plugged", "{kind} {image}");
        }
        assert_eq!(lab.runs(), runs, "{kind}{extra}");
        assert!(keyring.lookup(&pod(None), "elsewhere.example/x").await.is_empty());
        assert_eq!(lab.runs(), runs);
    }
}

#[tokio::test]
async fn the_same_question_at_the_same_time_is_asked_once() {
    let lab = Lab::new();
    let keyring = lab.keyring(lab.plugin(&format!("sleep 0.2; {}", answer("Image", r#","cacheDuration":"0s""#))));
    let (a, b) = (pod(None), pod(None));
    let (one, two) = tokio::join!(keyring.lookup(&a, "a.test/x"), keyring.lookup(&b, "a.test/x"));
    assert_eq!((names(&one).as_str(), one == two, lab.runs()), ("plugged", true, 1));
    assert!(lock_is_empty(&keyring));
}

fn lock_is_empty(keyring: &NodeKeyring) -> bool {
    keyring.plugins[0].idle()
}

#[tokio::test]
async fn a_plugin_that_fails_gives_nothing_and_says_why() {
    for (script, word) in [
        ("echo no luck >&2; exit 4", "exit status: 4: no luck"),
        ("echo s3cret", "error decoding credential provider plugin response from stdout"),
        (r#"echo '{"kind":"CredentialProviderResponse","apiVersion":"other/v1"}'"#, "actual apiVersion:other/v1"),
        (&answer("Never", ""), "valid cacheKeyType: Never"),
    ] {
        let lab = Lab::new();
        let keyring = lab.keyring(lab.plugin(script));
        let e = keyring.plugins[0].provide(&pod(None), "a.test/x").await.unwrap_err();
        assert!(e.contains(word) && !e.contains("s3cret"), "{script}: {e}");
        assert!(keyring.lookup(&pod(None), "a.test/x").await.is_empty());
    }
}

#[tokio::test]
async fn tokens_of_the_pods_service_account() {
    let attributes = |per_token, required: &[&str]| TokenAttributes {
        audience: "reg".into(),
        per_token,
        require_account: true,
        required_annotations: required.iter().map(|k| (*k).to_owned()).collect(),
        optional_annotations: vec!["more".into(), "absent".into()],
    };
    let check = r#"read request; case "$request" in *'"serviceAccountToken":"t'?'","serviceAccountAnnotations":{"id":"7","more":"m"}}') ;; *) echo "$request" >&2; exit 3;; esac"#;
    for (per_token, runs) in [(false, 1), (true, 2)] {
        let lab = Lab::new();
        let mut provider = lab.plugin(&format!("{check}\n{}", answer("Registry", "")));
        provider.token = Some(attributes(per_token, &["id"]));
        let keyring = lab.keyring(provider);
        for _ in 0..2 {
            let found = keyring.lookup(&pod(Some("sa")), "a.test/x").await;
            let origin = Origin::ServiceAccount { uid: "sa-uid".into(), namespace: "ns".into(), name: "sa".into() };
            assert_eq!((names(&found).as_str(), &found[0].origin), ("plugged", &origin));
        }
        assert_eq!(lab.runs(), runs);
        assert!(keyring.lookup(&pod(None), "a.test/x").await.is_empty(), "a pod without account");
        assert_eq!(lab.runs(), runs);
    }
    // An annotation that the account does not have: not this plugin's pod.
    let lab = Lab::new();
    let mut provider = lab.plugin(&answer("Image", ""));
    provider.token = Some(attributes(false, &["nope"]));
    assert!(lab.keyring(provider).lookup(&pod(Some("sa")), "a.test/x").await.is_empty());
    // The token itself as a password would be kept for others.
    let lab = Lab::new();
    let mut provider = lab.plugin(&answer("Image", "").replace(r#""password":"p""#, r#""password":"t0""#));
    provider.token = Some(attributes(false, &[]));
    let e = lab.keyring(provider).plugins[0].provide(&pod(Some("sa")), "a.test/x").await.unwrap_err();
    assert!(e.contains("returned the service account token as the password"), "{e}");
}
