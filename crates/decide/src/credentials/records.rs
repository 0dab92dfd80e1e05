//! Pull intents and records (KEP-2535): who has proven the right to an image that is on the node.
//!
//! An intent is written before a pull and removed after it; a record says with whose credentials an image was pulled. Formats and rules are
//! the Go kubelet's, so that either agent can go on with the other's files.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Credential, Origin};

const API_VERSION: &str = "kubelet.config.k8s.io/v1beta1";
/// Versions that are read.
const READ: [&str; 2] = [API_VERSION, "kubelet.config.k8s.io/v1alpha1"];
/// A record gets no more secrets while access is only checked.
const SECRETS_MAX: usize = 100;

/// An image whose pull was begun.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PullIntent {
    kind: String,
    api_version: String,
    /// The image as the pod's spec has it.
    pub image: String,
}

/// A Secret whose credentials pulled an image.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PullSecret {
    /// UID.
    pub uid: String,
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// [`super::Login::hash`].
    pub credential_hash: String,
}

/// A service account whose token pulled an image.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PullAccount {
    /// UID.
    pub uid: String,
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
}

/// Who may use an image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PullCredentials {
    /// Pods with one of these.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub kubernetes_secrets: Vec<PullSecret>,
    /// Pods with one of these.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub kubernetes_service_accounts: Vec<PullAccount>,
    /// Every pod: it was pulled without credentials, or with the node's.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub node_pods_accessible: bool,
}

impl PullCredentials {
    /// Who may use an image that was pulled with this; None: without credentials.
    pub fn of(used: Option<&Credential>) -> Self {
        let mut who = Self::default();
        match used.map(|c| (&c.origin, c)) {
            None | Some((Origin::Node, _)) => who.node_pods_accessible = true,
            Some((Origin::Secret { .. }, c)) => who.kubernetes_secrets.extend(secret_of(c)),
            Some((Origin::ServiceAccount { .. }, c)) => who.kubernetes_service_accounts.extend(account_of(c)),
        }
        who
    }
}

fn secret_of(c: &Credential) -> Option<PullSecret> {
    let Origin::Secret { uid, namespace, name } = &c.origin else { return None };
    Some(PullSecret {
        uid: uid.clone(),
        namespace: namespace.clone(),
        name: name.clone(),
        credential_hash: c.login.hash(),
    })
}

fn account_of(c: &Credential) -> Option<PullAccount> {
    let Origin::ServiceAccount { uid, namespace, name } = &c.origin else { return None };
    Some(PullAccount { uid: uid.clone(), namespace: namespace.clone(), name: name.clone() })
}

/// What is known of one image that was pulled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PulledRecord {
    kind: String,
    api_version: String,
    /// RFC 3339, seconds, UTC.
    pub last_updated_time: Option<String>,
    /// Image id as the runtime gave it.
    pub image_ref: String,
    /// By image name without tag and digest.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub credential_mapping: BTreeMap<String, PullCredentials>,
}

impl PullIntent {
    /// The intent to pull an image.
    pub fn new(image: &str) -> Self {
        Self { kind: "ImagePullIntent".into(), api_version: API_VERSION.into(), image: image.into() }
    }

    /// The file's content.
    pub fn encode(&self) -> Vec<u8> {
        encode(self)
    }

    /// Reads a file.
    ///
    /// # Errors
    /// It is something else.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let intent: Self = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
        check(&intent.kind, "ImagePullIntent", &intent.api_version).map(|()| intent)
    }
}

impl PulledRecord {
    /// A record of an image, with nobody in it yet. `now`: RFC 3339 in seconds.
    pub fn new(image_ref: &str, now: &str) -> Self {
        Self {
            kind: "ImagePulledRecord".into(),
            api_version: API_VERSION.into(),
            last_updated_time: Some(now.into()),
            image_ref: image_ref.into(),
            credential_mapping: BTreeMap::new(),
        }
    }

    /// The file's content.
    pub fn encode(&self) -> Vec<u8> {
        encode(self)
    }

    /// Reads a file.
    ///
    /// # Errors
    /// It is something else.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let mut record: Self = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
        check(&record.kind, "ImagePulledRecord", &record.api_version)?;
        record.api_version = API_VERSION.into();
        Ok(record)
    }

    /// Adds who pulled the image now; true when that says something new.
    pub fn merge(&mut self, name: &str, new: &PullCredentials, now: &str) -> bool {
        if *new == PullCredentials::default() {
            return false;
        }
        let changed = match self.credential_mapping.get_mut(name) {
            None => {
                self.credential_mapping.insert(name.to_owned(), new.clone());
                true
            }
            Some(known) if known.node_pods_accessible => false,
            Some(known) if new.node_pods_accessible => {
                *known = PullCredentials { node_pods_accessible: true, ..PullCredentials::default() };
                true
            }
            Some(known) => {
                let secrets = new.kubernetes_secrets.iter().filter(|s| merge_secret(known, s)).count();
                let mut accounts = 0;
                for account in &new.kubernetes_service_accounts {
                    if !known.kubernetes_service_accounts.contains(account) {
                        known.kubernetes_service_accounts.push(account.clone());
                        accounts += 1;
                    }
                }
                known.kubernetes_secrets.sort_by(|a, b| place(a).cmp(&place(b)));
                known
                    .kubernetes_service_accounts
                    .sort_by(|a, b| (&a.namespace, &a.name, &a.uid).cmp(&(&b.namespace, &b.name, &b.uid)));
                secrets + accounts > 0
            }
        };
        if changed {
            self.last_updated_time = Some(now.to_owned());
        }
        changed
    }
}

fn place(s: &PullSecret) -> (&String, &String, &String) {
    (&s.namespace, &s.name, &s.uid)
}

/// One entry for each Secret, with its newest hash; true when something changed.
fn merge_secret(known: &mut PullCredentials, new: &PullSecret) -> bool {
    match known.kubernetes_secrets.iter_mut().find(|k| place(k) == place(new)) {
        Some(same) if same.credential_hash == new.credential_hash => false,
        Some(same) => {
            same.credential_hash.clone_from(&new.credential_hash);
            true
        }
        None => {
            known.kubernetes_secrets.push(new.clone());
            true
        }
    }
}

fn encode(value: &impl Serialize) -> Vec<u8> {
    // Neither names nor hashes hold anything that Go would escape; plain data cannot fail to be written.
    let mut bytes = serde_json::to_vec(value).unwrap_or_default();
    bytes.push(b'\n');
    bytes
}

fn check(kind: &str, wanted: &str, version: &str) -> Result<(), String> {
    if kind != wanted || !READ.contains(&version) {
        return Err(format!("it is {kind} of {version}, not {wanted}"));
    }
    Ok(())
}

/// The name of an intent's (of the image) or a record's (of the image id) file.
pub fn file_name(of: &str) -> String {
    use sha2::{Digest, Sha256};
    let hex: String = Sha256::digest(of).iter().map(|b| format!("{b:02x}")).collect();
    format!("sha256-{hex}")
}

/// An image as the spec writes it, without tag and digest.
///
/// # Errors
/// It is no image name.
pub fn without_tag(image: &str) -> Result<String, String> {
    let parsed = crate::config::image_name::parse(image)?;
    let mut name = image;
    if !parsed.digest.is_empty() {
        name = name.strip_suffix(&format!("@{}", parsed.digest)).unwrap_or(name);
    }
    // `latest` is told of a name without a tag, too.
    Ok(name.strip_suffix(&format!(":{}", parsed.tag)).filter(|_| !parsed.tag.is_empty()).unwrap_or(name).to_owned())
}

/// KubeletConfiguration `imagePullCredentialsVerificationPolicy`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Whoever may run on the node may use its images.
    NeverVerify,
    /// What the kubelet did not pull is everybody's.
    NeverVerifyPreloaded,
    /// Only these images are everybody's: names, or `PREFIX/*`.
    NeverVerifyAllowlisted(Vec<String>),
    /// Every pod must prove its right.
    AlwaysVerify,
}

impl Policy {
    /// True when a pod must prove its right to this image. `pulled`: a record or an intent is there.
    pub fn must_verify(&self, image: &str, pulled: bool) -> bool {
        match self {
            Self::NeverVerify => false,
            Self::NeverVerifyPreloaded => pulled,
            Self::AlwaysVerify => true,
            Self::NeverVerifyAllowlisted(list) => {
                let name = without_tag(image).unwrap_or_else(|_| image.to_owned());
                !list.iter().any(|pattern| match pattern.strip_suffix('*') {
                    Some(prefix) if prefix.ends_with('/') => name.starts_with(prefix),
                    _ => *pattern == name,
                })
            }
        }
    }
}

/// Whether a pod may use an image that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Access {
    /// It may.
    Granted,
    /// It may; the record should learn of these credentials too.
    GrantedNewly(PullCredentials),
    /// It must pull.
    Unproven,
    /// It depends on the pod's credentials: ask [`access_with`].
    Depends,
}

/// What can be said without the pod's credentials. `name`: [`without_tag`].
pub fn access(record: Option<&PulledRecord>, name: &str) -> Access {
    match record.and_then(|r| r.credential_mapping.get(name)) {
        None => Access::Unproven,
        Some(known) if known.node_pods_accessible => Access::Granted,
        Some(known) if known.kubernetes_secrets.is_empty() && known.kubernetes_service_accounts.is_empty() => {
            Access::Unproven
        }
        Some(_) => Access::Depends,
    }
}

/// The verdict with the pod's credentials for the image: the same login, the same Secret, or the same service account as one that pulled it.
pub fn access_with(record: &PulledRecord, name: &str, credentials: &[Credential]) -> Access {
    let Some(known) = record.credential_mapping.get(name) else { return Access::Unproven };
    let few = known.kubernetes_secrets.len() < SECRETS_MAX;
    for own in credentials.iter().filter_map(secret_of) {
        let newly = || {
            Access::GrantedNewly(PullCredentials {
                kubernetes_secrets: vec![own.clone()],
                ..PullCredentials::default()
            })
        };
        for k in &known.kubernetes_secrets {
            let same_hash = !k.credential_hash.is_empty() && k.credential_hash == own.credential_hash;
            let same_secret = place(k) == place(&own);
            match (same_hash, same_secret) {
                (true, true) => return Access::Granted,
                (true, false) => return if few { newly() } else { Access::Granted },
                (false, true) if few => return newly(),
                _ => {}
            }
        }
    }
    let account = credentials.iter().find_map(account_of);
    match account {
        Some(account) if known.kubernetes_service_accounts.contains(&account) => Access::Granted,
        _ => Access::Unproven,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::credentials::Login;

    const NOW: &str = "2026-11-29T12:00:00Z";

    fn credential(uid: &str, password: &str) -> Credential {
        Credential {
            login: Login { username: "u".into(), password: password.into(), email: String::new() },
            origin: Origin::Secret { uid: uid.into(), namespace: "ns".into(), name: format!("n{uid}") },
        }
    }

    #[test]
    fn files_are_gos() {
        let intent = PullIntent::new("docker.io/testing/test:latest");
        let text = r#"{"kind":"ImagePullIntent","apiVersion":"kubelet.config.k8s.io/v1beta1","image":"docker.io/testing/test:latest"}"#;
        assert_eq!(String::from_utf8(intent.encode()).unwrap(), format!("{text}\n"));
        assert_eq!(PullIntent::decode(text.as_bytes()), Ok(intent));
        assert!(PullIntent::decode(text.replace("Intent", "Record").as_bytes()).is_err());
        assert_eq!(
            file_name("docker.io/testing/test:latest"),
            "sha256-aef2af226629a35d5f3ef0fdbb29fdbebf038d0acd8850590e8c48e1e283aa56"
        );
        let mut record = PulledRecord::new("sha256:1", NOW);
        assert_eq!(
            String::from_utf8(record.encode()).unwrap(),
            format!(
                "{{\"kind\":\"ImagePulledRecord\",\"apiVersion\":\"kubelet.config.k8s.io/v1beta1\",\"lastUpdatedTime\":\"{NOW}\",\"imageRef\":\"sha256:1\"}}\n"
            )
        );
        record.merge("img", &PullCredentials::of(Some(&credential("1", "p"))), NOW);
        let text = String::from_utf8(record.encode()).unwrap();
        let who = r#""credentialMapping":{"img":{"kubernetesSecrets":[{"uid":"1","namespace":"ns","name":"n1","credentialHash":"edbd57ca9372e64eb1c9070ecf3a049ac553596b0529acf034c7a71d4e618e88"}]}}"#;
        assert!(text.contains(who), "{text}");
        assert_eq!(PulledRecord::decode(text.as_bytes()), Ok(record));
    }

    #[test]
    fn names_without_tag() {
        let hex = "a".repeat(64);
        for (image, want) in [
            ("busybox", "busybox".to_owned()),
            ("busybox:1", "busybox".into()),
            ("busybox:latest", "busybox".into()),
            ("h:5000/a/b:2", "h:5000/a/b".into()),
            ("h:5000/a/b", "h:5000/a/b".into()),
            (&format!("x@sha256:{hex}"), "x".into()),
            (&format!("x:1@sha256:{hex}"), "x".into()),
        ] {
            assert_eq!(without_tag(image), Ok(want), "{image}");
        }
        assert!(without_tag(" ").is_err());
    }

    #[test]
    fn merging() {
        let mut record = PulledRecord::new("r", "then");
        let of = |uid: &str, password: &str| PullCredentials::of(Some(&credential(uid, password)));
        assert!(!record.merge("i", &PullCredentials::default(), NOW));
        assert!(record.merge("i", &of("2", "p"), NOW));
        assert_eq!(record.last_updated_time.as_deref(), Some(NOW));
        assert!(!record.merge("i", &of("2", "p"), "later"));
        assert!(record.merge("i", &of("1", "p"), "later"));
        assert!(record.merge("i", &of("2", "new"), "later"));
        let known = &record.credential_mapping["i"].kubernetes_secrets;
        assert_eq!(known.iter().map(|s| s.uid.as_str()).collect::<Vec<_>>(), ["1", "2"]);
        assert_eq!(known[1].credential_hash, credential("2", "new").login.hash());
        assert!(record.merge("i", &PullCredentials::of(None), "later"));
        assert!(!record.merge("i", &of("9", "p"), "later"), "everybody may already");
        assert!(record.credential_mapping["i"].kubernetes_secrets.is_empty());
        assert!(record.merge("other", &of("9", "p"), "later"));
    }

    #[test]
    fn policies() {
        let list = Policy::NeverVerifyAllowlisted(vec!["a.test/x".into(), "b.test/team/*".into()]);
        for (policy, image, pulled, want) in [
            (&Policy::NeverVerify, "x", true, false),
            (&Policy::NeverVerifyPreloaded, "x", true, true),
            (&Policy::NeverVerifyPreloaded, "x", false, false),
            (&Policy::AlwaysVerify, "x", false, true),
            (&list, "a.test/x:1", true, false),
            (&list, "a.test/xy:1", true, true),
            (&list, "b.test/team/any:1", true, false),
            (&list, "b.test/team", true, true),
        ] {
            assert_eq!(policy.must_verify(image, pulled), want, "{policy:?} {image}");
        }
    }

    #[test]
    fn nobody_runs_anothers_private_image() {
        let mut record = PulledRecord::new("r", NOW);
        assert_eq!(access(None, "i"), Access::Unproven);
        assert_eq!(access(Some(&record), "i"), Access::Unproven, "an intent became a record without credentials");
        record.merge("i", &PullCredentials::of(Some(&credential("1", "p"))), NOW);
        assert_eq!(access(Some(&record), "i"), Access::Depends);
        assert_eq!(access(Some(&record), "other/name"), Access::Unproven, "the same bytes under another name");
        let newly = |c: &Credential| Access::GrantedNewly(PullCredentials::of(Some(c)));
        for (own, want) in [
            (vec![], Access::Unproven),
            (vec![credential("1", "p")], Access::Granted),
            (vec![credential("2", "p")], newly(&credential("2", "p"))),
            (vec![credential("1", "changed")], newly(&credential("1", "changed"))),
            (vec![credential("2", "else")], Access::Unproven),
            (vec![Credential { origin: Origin::Node, ..credential("1", "p") }], Access::Unproven),
        ] {
            assert_eq!(access_with(&record, "i", &own), want, "{own:?}");
        }
        let account = |uid: &str| Credential {
            login: Login::default(),
            origin: Origin::ServiceAccount { uid: uid.into(), namespace: "ns".into(), name: "sa".into() },
        };
        record.merge("s", &PullCredentials::of(Some(&account("7"))), NOW);
        assert_eq!(access_with(&record, "s", &[account("7")]), Access::Granted);
        assert_eq!(access_with(&record, "s", &[account("8")]), Access::Unproven);
        record.merge("free", &PullCredentials::of(None), NOW);
        assert_eq!(access(Some(&record), "free"), Access::Granted);
    }
}
