//! Who we are right now: tokens and certificates, read again when their files change, asked for again when a plugin's run out.
//!
//! A file that was good and is now unreadable (half a rotation) leaves the last good one in use.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderValue;
use jiff::Timestamp;
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::Wall;
use crate::error::{ClusterError, ClusterResult, ErrorKind};
use crate::exec;
use crate::kubeconfig::{ClusterConfig, Material, Token};
use crate::pki::cert::Identity;
use crate::stamp::Stamp;

/// How often files are looked at (their stamp only) while calls are made.
const CHECK: Duration = Duration::from_secs(10);

/// The credentials of one moment.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// `Authorization` header.
    pub bearer: Option<HeaderValue>,
    /// Client certificate.
    pub identity: Option<Arc<Identity>>,
    /// CA bundle, PEM; None: the host's roots.
    pub ca: Option<Arc<[u8]>>,
    /// Grows when `identity` or `ca` changed: connections made before are outdated.
    pub generation: u64,
}

impl Snapshot {
    fn same_credentials(&self, other: &Self) -> bool {
        self.bearer == other.bearer && self.generation == other.generation
    }
}

#[derive(Default)]
struct State {
    now: Option<Arc<Snapshot>>,
    stamps: Vec<Option<Stamp>>,
    checked: Option<Instant>,
    expires: Option<Timestamp>,
    /// The last failure that was told, so that it is told once.
    told: Option<ClusterError>,
}

impl State {
    fn tell(&mut self, error: ClusterError, what: &str) {
        if self.told.as_ref() != Some(&error) {
            tracing::warn!(%error, "{what}");
            self.told = Some(error);
        }
    }
}

/// The credentials that a kubeconfig describes.
pub struct Credentials {
    config: ClusterConfig,
    wall: Wall,
    state: Mutex<State>,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credentials").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Credentials {
    /// Reads nothing yet.
    pub fn new(config: ClusterConfig, wall: Wall) -> Self {
        Self { config, wall, state: Mutex::default() }
    }

    /// What to send now. A call costs a look at the clock; every 10 s a `stat` for each file.
    ///
    /// # Errors
    /// Unauthorized: a file or the plugin failed and there is nothing to fall back to, or the client certificate has expired.
    pub async fn current(&self) -> ClusterResult<Arc<Snapshot>> {
        let mut state = self.state.lock().await;
        let due = state.checked.is_none_or(|at| at.elapsed() >= CHECK);
        let run_out = state.expires.is_some_and(|at| at <= (self.wall)());
        let outdated = state.now.as_ref().is_none_or(|n| self.expired(n).is_some());
        if due || run_out || outdated {
            self.refresh(&mut state, run_out).await?;
        }
        let now = state.now.clone().unwrap_or_default();
        match self.expired(&now) {
            Some(error) => Err(error),
            None => Ok(now),
        }
    }

    /// The server said 401 to `rejected`: looks again at once. True when there are other credentials now, so that one retry makes
    /// sense.
    pub async fn rejected(&self, rejected: &Snapshot) -> bool {
        let mut state = self.state.lock().await;
        if let Some(now) = &state.now
            && !now.same_credentials(rejected)
        {
            return true;
        }
        if let Err(error) = self.refresh(&mut state, true).await {
            state.tell(error, "Credentials could not be renewed");
            return false;
        }
        state.now.as_ref().is_some_and(|now| !now.same_credentials(rejected))
    }

    /// Looks at the files on the next call, whatever the time.
    pub async fn recheck(&self) {
        self.state.lock().await.checked = None;
    }

    /// The client certificate's end of life, when there is one.
    pub async fn expiry(&self) -> Option<Timestamp> {
        self.state.lock().await.now.as_ref()?.identity.as_ref().map(|i| i.info.not_after)
    }

    fn files(&self) -> Vec<PathBuf> {
        let auth = &self.config.auth;
        let mut files: Vec<PathBuf> = Vec::new();
        if let Some(Token::File(path)) = &auth.token {
            files.push(path.clone());
        }
        let materials = auth.certificate.iter().flat_map(|(c, k)| [c, k]).chain(self.config.ca.iter());
        files.extend(materials.filter_map(Material::path).map(ToOwned::to_owned));
        files
    }

    /// An expired certificate without a token beside it would only ever earn 401s: say so without asking.
    fn expired(&self, snapshot: &Snapshot) -> Option<ClusterError> {
        let identity = snapshot.identity.as_ref()?;
        let now = (self.wall)();
        if snapshot.bearer.is_some() || now <= identity.info.not_after {
            return None;
        }
        let source = match &self.config.auth.certificate {
            Some((certificate, _)) => certificate.describe(),
            None => "the exec plugin's certificate".to_owned(),
        };
        Some(self.fail(format!("client certificate {source} expired at {}, now is {now}", identity.info.not_after)).advise(
            "renew it, or remove the kubeconfig and start with --bootstrap-kubeconfig; if the time is wrong, set this host's clock",
        ))
    }

    /// What an operator can do when the server says 401 to `refused`.
    pub fn advice(&self, refused: &Snapshot) -> String {
        let auth = &self.config.auth;
        let now = (self.wall)();
        let source = match (&auth.token, &auth.certificate, &auth.exec) {
            (Some(Token::File(path)), ..) => format!("the token in {}", path.display()),
            (Some(Token::Inline(_)), ..) => format!("the token in {}", self.config.path.display()),
            (None, Some((certificate, _)), _) => format!("the client certificate {}", certificate.describe()),
            (None, None, Some(plugin)) => format!("what {} gave", plugin.command.display()),
            (None, None, None) => {
                return format!(
                    "{} has no credentials: put a token or client certificate there",
                    self.config.path.display()
                );
            }
        };
        match refused.identity.as_ref().filter(|i| refused.bearer.is_none() && i.info.not_before > now) {
            Some(early) => format!(
                "{source} is not valid before {}, now is {now}: set this host's clock, or renew the certificate",
                early.info.not_before
            ),
            None => format!("the API server does not know {source}: renew it, and check this host's clock"),
        }
    }

    fn fail(&self, message: impl Into<String>) -> ClusterError {
        ClusterError::new(
            format!("get the credentials of {}", self.config.path.display()),
            ErrorKind::Unauthorized,
            message,
        )
    }

    async fn refresh(&self, state: &mut State, force_exec: bool) -> ClusterResult<()> {
        let stamps: Vec<_> = self.files().iter().map(|f| Stamp::of(f)).collect();
        state.checked = Some(Instant::now());
        let exec_due = self.config.auth.exec.is_some() && (force_exec || state.now.is_none());
        if state.now.is_some() && stamps == state.stamps && !exec_due {
            return Ok(());
        }
        match self.load(exec_due, state).await {
            Ok((mut fresh, expires)) => {
                let old = state.now.as_deref();
                let changed = old.is_none_or(|o| o.identity != fresh.identity || o.ca != fresh.ca);
                fresh.generation = old.map_or(1, |o| o.generation + u64::from(changed));
                state.expires = expires;
                state.stamps = stamps;
                state.now = Some(Arc::new(fresh));
                state.told = None;
                Ok(())
            }
            // What a plugin gave has run out or was refused: there is nothing to go on with.
            Err(error) if state.now.is_none() || exec_due => Err(error),
            Err(error) => {
                state.tell(error, "Credentials changed on disk but cannot be read; the last ones stay in use");
                Ok(())
            }
        }
    }

    async fn load(&self, exec_due: bool, state: &State) -> ClusterResult<(Snapshot, Option<Timestamp>)> {
        let auth = &self.config.auth;
        let mut fresh = Snapshot::default();
        if let Some(ca) = &self.config.ca {
            let pem = ca.read().map_err(|e| self.fail(format!("read CA {}: {e}", ca.describe())))?;
            crate::pki::cert::certificates(&pem).map_err(|e| self.fail(format!("CA {}: {e}", ca.describe())))?;
            fresh.ca = Some(pem.into());
        }
        if let Some((certificate, key)) = &auth.certificate {
            let read = |m: &Material| m.read().map_err(|e| self.fail(format!("read {}: {e}", m.describe())));
            let identity = Identity::from_pem(&read(certificate)?, &read(key)?)
                .map_err(|e| self.fail(format!("client certificate {}: {e}", certificate.describe())))?;
            fresh.identity = Some(Arc::new(identity));
        }
        match &auth.token {
            Some(Token::Inline(token)) => fresh.bearer = Some(self.bearer(token)?),
            Some(Token::File(path)) => {
                let text = std::fs::read_to_string(path)
                    .map_err(|e| self.fail(format!("read token file {}: {e}", path.display())))?;
                if text.trim().is_empty() {
                    return Err(self.fail(format!("token file {} is empty", path.display())));
                }
                fresh.bearer = Some(self.bearer(text.trim())?);
            }
            None => {}
        }
        let Some(plugin) = &auth.exec else { return Ok((fresh, None)) };
        if !exec_due && let Some(now) = &state.now {
            fresh.bearer.clone_from(&now.bearer);
            fresh.identity.clone_from(&now.identity);
            return Ok((fresh, state.expires));
        }
        let credential = exec::run(plugin, &self.config).await?;
        if let Some(token) = &credential.token {
            fresh.bearer = Some(self.bearer(token)?);
        }
        if let Some((certificate, key)) = &credential.certificate {
            let identity = Identity::from_pem(certificate, key)
                .map_err(|e| self.fail(format!("certificate of exec plugin {}: {e}", plugin.command.display())))?;
            fresh.identity = Some(Arc::new(identity));
        }
        Ok((fresh, credential.expires))
    }

    fn bearer(&self, token: &str) -> ClusterResult<HeaderValue> {
        let mut value = HeaderValue::from_str(&format!("Bearer {token}"))
            .map_err(|_| self.fail("the token has characters that a header cannot carry"))?;
        value.set_sensitive(true);
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::atomic::{AtomicI64, Ordering};

    use super::*;
    use crate::kubeconfig::{Auth, ExecConfig};

    fn config(auth: Auth) -> ClusterConfig {
        let text = "{clusters: [{name: c, cluster: {server: 'https://h:1'}}], contexts: [{name: x, context: {cluster: c}}], current-context: x}";
        ClusterConfig::parse(Path::new("/k"), text).unwrap().with_auth(auth)
    }

    fn pem(cn: &str, years: (i32, i32)) -> String {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::default();
        params.distinguished_name.push(rcgen::DnType::CommonName, cn);
        params.not_before = rcgen::date_time_ymd(years.0, 1, 1);
        params.not_after = rcgen::date_time_ymd(years.1, 1, 1);
        params.self_signed(&key).unwrap().pem() + &key.serialize_pem()
    }

    fn certificate(path: &Path) -> Auth {
        let file = Material::File(path.to_owned());
        Auth { certificate: Some((file.clone(), file)), ..Auth::default() }
    }

    fn cn(snapshot: &Snapshot) -> String {
        snapshot.identity.as_ref().unwrap().info.common_name.clone()
    }

    #[tokio::test(start_paused = true)]
    async fn a_token_file_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("token");
        std::fs::write(&file, "one\n").unwrap();
        let c = Credentials::new(
            config(Auth { token: Some(Token::File(file.clone())), ..Auth::default() }),
            crate::system_wall(),
        );
        let one = c.current().await.unwrap();
        assert_eq!(one.bearer.as_ref().unwrap(), "Bearer one");
        std::fs::write(&file, "second\n").unwrap();
        assert_eq!(c.current().await.unwrap().bearer.as_ref().unwrap(), "Bearer one");
        assert!(c.rejected(&one).await, "a 401 looks at once");
        assert_eq!(c.current().await.unwrap().bearer.as_ref().unwrap(), "Bearer second");
        std::fs::write(&file, "third one\n").unwrap();
        tokio::time::advance(CHECK).await;
        let third = c.current().await.unwrap();
        assert_eq!(third.bearer.as_ref().unwrap(), "Bearer third one");
        assert!(!c.rejected(&third).await);
        std::fs::remove_file(&file).unwrap();
        tokio::time::advance(CHECK).await;
        assert_eq!(c.current().await.unwrap().bearer.as_ref().unwrap(), "Bearer third one");
    }

    #[tokio::test(start_paused = true)]
    async fn a_rotated_certificate_is_picked_up_and_half_a_rotation_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("current.pem");
        std::fs::write(&file, pem("a", (2020, 2100))).unwrap();
        let c = Credentials::new(config(certificate(&file)), crate::system_wall());
        let first = c.current().await.unwrap();
        assert_eq!((cn(&first).as_str(), first.generation), ("a", 1));
        std::fs::write(&file, "-----BEGIN CERT").unwrap();
        tokio::time::advance(CHECK).await;
        assert_eq!(cn(&c.current().await.unwrap()), "a");
        std::fs::write(&file, pem("b", (2020, 2100))).unwrap();
        c.recheck().await;
        let second = c.current().await.unwrap();
        assert_eq!((cn(&second).as_str(), second.generation), ("b", 2));
    }

    #[tokio::test(start_paused = true)]
    async fn an_expired_certificate_is_an_error_until_it_is_renewed() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("current.pem");
        std::fs::write(&file, pem("a", (2020, 2021))).unwrap();
        let c = Credentials::new(config(certificate(&file)), crate::system_wall());
        let e = c.current().await.unwrap_err();
        assert_eq!(e.kind, ErrorKind::Unauthorized);
        assert!(e.to_string().contains("expired at 2021-01-01T00:00:00Z") && e.advice.contains("clock"), "{e}");
        std::fs::write(&file, pem("b", (2020, 2100))).unwrap();
        assert_eq!(cn(&c.current().await.unwrap()), "b", "no wait for the next look");
    }

    #[tokio::test]
    async fn a_key_of_another_certificate_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        std::fs::write(&a, pem("a", (2020, 2100))).unwrap();
        std::fs::write(&b, pem("b", (2020, 2100))).unwrap();
        let auth = Auth { certificate: Some((Material::File(a), Material::File(b))), ..Auth::default() };
        let e = Credentials::new(config(auth), crate::system_wall()).current().await.unwrap_err();
        assert!(e.message.contains("does not belong"), "{e}");
    }

    #[tokio::test]
    async fn a_plugin_runs_once_until_its_credential_ends() {
        let dir = tempfile::tempdir().unwrap();
        let count = dir.path().join("count");
        let script = format!(
            r#"echo x >>{0}; n=$(wc -l <{0}); echo '{{"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential","status":{{"token":"t'$n'","expirationTimestamp":"2030-01-01T00:00:00Z"}}}}'"#,
            count.display()
        );
        let plugin = ExecConfig {
            api_version: "client.authentication.k8s.io/v1".into(),
            command: "/bin/sh".into(),
            args: vec!["-c".into(), script],
            ..ExecConfig::default()
        };
        let seconds = Arc::new(AtomicI64::new(1_800_000_000));
        let wall: Wall = {
            let seconds = seconds.clone();
            Arc::new(move || Timestamp::from_second(seconds.load(Ordering::Relaxed)).unwrap())
        };
        let c = Credentials::new(config(Auth { exec: Some(plugin), ..Auth::default() }), wall);
        for _ in 0..3 {
            assert_eq!(c.current().await.unwrap().bearer.as_ref().unwrap(), "Bearer t1");
        }
        seconds.store(1_900_000_000, Ordering::Relaxed);
        assert_eq!(c.current().await.unwrap().bearer.as_ref().unwrap(), "Bearer t2");
    }
}
