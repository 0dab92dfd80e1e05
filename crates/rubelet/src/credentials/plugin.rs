//! One credential provider plugin (`credentialprovider.kubelet.k8s.io`): a program that is asked about an image on its standard input.
//!
//! Equal questions at the same time are asked once. Answers are kept by image, registry or for all, for as long as the plugin says. A plugin has
//! one minute.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use decide::credentials::{DockerConfig, Login, Origin, place_matches};
use model::pod::DesiredPod;
use pod::objects::PodObjects;
use serde::{Deserialize, Serialize};
use telemetry::metrics::Metrics;
use tokio::io::AsyncWriteExt;
use tokio::sync::OnceCell;
use tokio::time::Instant;

use super::config::{Provider, TokenAttributes};

/// How long a plugin may take.
const DEADLINE: Duration = Duration::from_secs(60);
/// The key of answers that are good for every image; no image is called so.
const EVERYWHERE: &str = "<global>";

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Request<'a> {
    kind: &'static str,
    api_version: &'a str,
    image: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    service_account_token: &'a str,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    service_account_annotations: &'a BTreeMap<String, String>,
}

#[derive(Clone, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Response {
    kind: String,
    api_version: String,
    #[serde(default)]
    cache_key_type: String,
    cache_duration: Option<String>,
    auth: Option<BTreeMap<String, Auth>>,
}

#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Auth {
    #[serde(default)]
    username: String,
    #[serde(default)]
    password: String,
}

/// The pod's service account, as the plugin is told of it.
#[derive(Default)]
struct Account {
    token: String,
    annotations: BTreeMap<String, String>,
    /// What answers are kept under.
    key: Vec<String>,
    origin: Option<Origin>,
}

/// What an answer is kept under: image, registry or all; and the service account's part.
type Key = (String, Vec<String>);

struct Kept {
    config: DockerConfig,
    until: Instant,
}

/// A question that is being asked, for all who ask it.
type Flight = Arc<OnceCell<Result<Response, String>>>;

/// A plugin and its answers.
pub(super) struct Plugin {
    provider: Provider,
    program: PathBuf,
    objects: Arc<dyn PodObjects>,
    metrics: Arc<Metrics>,
    kept: Mutex<HashMap<Key, Kept>>,
    flights: Mutex<HashMap<Key, Flight>>,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Plugin {
    pub(super) fn new(provider: Provider, bin: &Path, objects: Arc<dyn PodObjects>, metrics: Arc<Metrics>) -> Self {
        let program = bin.join(&provider.name);
        Self { provider, program, objects, metrics, kept: Mutex::default(), flights: Mutex::default() }
    }

    pub(super) fn name(&self) -> &str {
        &self.provider.name
    }

    /// Its logins for an image, and whose they are; None when it has nothing to say about this image or pod.
    pub(super) async fn provide(
        &self,
        pod: &DesiredPod,
        image: &str,
    ) -> Result<Option<(DockerConfig, Origin)>, String> {
        if !self.provider.match_images.iter().any(|place| place_matches(place, image)) {
            return Ok(None);
        }
        let account = match &self.provider.token {
            None => Account::default(),
            Some(wanted) => match self.account(pod, wanted).await? {
                Some(account) => account,
                None => return Ok(None),
            },
        };
        let origin = account.origin.clone().unwrap_or(Origin::Node);
        if let Some(config) = self.known(image, &account.key) {
            return Ok(Some((config, origin)));
        }
        let response = self.ask_once(image, &account).await?;
        let per_token = self.provider.token.as_ref().is_some_and(|t| t.per_token);
        let auth = response.auth.unwrap_or_default();
        if !account.token.is_empty() && !per_token && auth.values().any(|a| a.password == account.token) {
            return Err("credential provider plugin returned the service account token as the password which is not allowed when service \
                        account cache type is not set to 'Token'"
                .to_owned());
        }
        let base = match response.cache_key_type.as_str() {
            "Image" => image,
            "Registry" => registry(image),
            "Global" => EVERYWHERE,
            other => {
                return Err(format!("credential provider plugin did not return a valid cacheKeyType: {other}"));
            }
        };
        let login = |a: Auth| Login { username: a.username, password: a.password, email: String::new() };
        let config: DockerConfig = auth.into_iter().map(|(place, a)| (place, login(a))).collect();
        let duration = match &response.cache_duration {
            Some(text) => ::config::duration::parse(text).map_err(|e| format!("cacheDuration: {e}"))?,
            None => self.provider.default_cache_duration,
        };
        if !duration.is_zero() {
            let now = Instant::now();
            let mut kept = lock(&self.kept);
            kept.retain(|_, k| k.until > now);
            kept.insert((base.to_owned(), account.key), Kept { config: config.clone(), until: now + duration });
        }
        Ok(Some((config, origin)))
    }

    /// No question is being asked.
    #[cfg(test)]
    pub(super) fn idle(&self) -> bool {
        lock(&self.flights).is_empty()
    }

    fn known(&self, image: &str, account: &[String]) -> Option<DockerConfig> {
        let kept = lock(&self.kept);
        [image, registry(image), EVERYWHERE].into_iter().find_map(|base| {
            let kept = kept.get(&(base.to_owned(), account.to_vec()))?;
            (kept.until > Instant::now()).then(|| kept.config.clone())
        })
    }

    /// None when the plugin is not to be asked for this pod.
    async fn account(&self, pod: &DesiredPod, wanted: &TokenAttributes) -> Result<Option<Account>, String> {
        let name = pod.spec().service_account_name.as_deref().unwrap_or_default();
        if name.is_empty() {
            return Ok((!wanted.require_account).then(Account::default));
        }
        let account = self.objects.service_account(pod.namespace(), name).await;
        let account = account.map_err(|e| format!("failed to get service account: {e}"))?;
        let all = account.metadata.annotations.unwrap_or_default();
        let mut annotations = BTreeMap::new();
        for key in &wanted.required_annotations {
            // A way for workloads to choose: without it the plugin is not theirs.
            let Some(value) = all.get(key) else { return Ok(None) };
            annotations.insert(key.clone(), value.clone());
        }
        for key in &wanted.optional_annotations {
            annotations.extend(all.get(key).map(|value| (key.clone(), value.clone())));
        }
        let token = self.objects.token(pod, &wanted.audience, None).await;
        let token = token.map_err(|e| format!("failed to get service account token: {e}"))?.token;
        let uid = account.metadata.uid.unwrap_or_default();
        let mut key = vec![pod.namespace().to_owned(), name.to_owned(), uid.clone()];
        key.extend(annotations.iter().flat_map(|(k, v)| [k.clone(), v.clone()]));
        if wanted.per_token {
            key.push(token.clone());
        }
        let origin = Origin::ServiceAccount { uid, namespace: pod.namespace().to_owned(), name: name.to_owned() };
        Ok(Some(Account { token, annotations, key, origin: Some(origin) }))
    }

    /// Asks, or waits for the answer to the same question.
    async fn ask_once(&self, image: &str, account: &Account) -> Result<Response, String> {
        let mut parts = vec![account.token.clone()];
        parts.extend(account.annotations.iter().flat_map(|(k, v)| [k.clone(), v.clone()]));
        let key = (image.to_owned(), parts);
        let flight = lock(&self.flights).entry(key.clone()).or_default().clone();
        let answer = flight.get_or_init(|| self.ask(image, account)).await.clone();
        let mut flights = lock(&self.flights);
        if flights.get(&key).is_some_and(|f| Arc::ptr_eq(f, &flight)) {
            flights.remove(&key);
        }
        answer.map_err(|e| format!("failed to get credential from external registry credential provider: {e}"))
    }

    async fn ask(&self, image: &str, account: &Account) -> Result<Response, String> {
        let request = Request {
            kind: "CredentialProviderRequest",
            api_version: &self.provider.api_version,
            image,
            service_account_token: &account.token,
            service_account_annotations: &account.annotations,
        };
        let mut input = serde_json::to_vec(&request).map_err(|e| format!("failed to encode auth request: {e}"))?;
        input.push(b'\n');
        let failed = |e: &dyn std::fmt::Display| {
            format!("error execing credential provider plugin {} for image {image}: {e}", self.provider.name)
        };
        let run = async {
            let mut child = tokio::process::Command::new(&self.program)
                .args(&self.provider.args)
                .envs(&self.provider.env)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .kill_on_drop(true)
                .spawn()?;
            let stdin = child.stdin.take();
            let write = async move {
                if let Some(mut stdin) = stdin {
                    // A plugin that does not read its input closes the pipe; its answer counts.
                    let _ = stdin.write_all(&input).await;
                }
            };
            let ((), output) = tokio::join!(write, child.wait_with_output());
            output
        };
        let begin = Instant::now();
        let output = tokio::time::timeout(DEADLINE, run).await;
        let fine = matches!(&output, Ok(Ok(output)) if output.status.success());
        self.metrics.credential_plugin(&self.provider.name, begin.elapsed(), !fine);
        let output = output.map_err(|_| failed(&"context deadline exceeded"))?.map_err(|e| failed(&e))?;
        if !output.status.success() {
            let stderr: String = String::from_utf8_lossy(&output.stderr).chars().take(1024).collect();
            return Err(format!("{}: {}", failed(&output.status), stderr.trim()));
        }
        // No word of the answer goes into an error: it may hold a password.
        let response: Response = serde_json::from_slice(&output.stdout)
            .map_err(|_| "error decoding credential provider plugin response from stdout".to_owned())?;
        if response.api_version != self.provider.api_version {
            return Err(format!(
                "apiVersion from credential plugin response did not match expected apiVersion:{}, actual apiVersion:{}",
                self.provider.api_version, response.api_version
            ));
        }
        if response.kind != "CredentialProviderResponse" {
            return Err("error decoding credential provider plugin response from stdout".to_owned());
        }
        Ok(response)
    }
}

/// Host and port of an image.
fn registry(image: &str) -> &str {
    image.split('/').next().unwrap_or_default()
}
