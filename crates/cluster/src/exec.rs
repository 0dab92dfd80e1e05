//! Exec credential plugins (`client.authentication.k8s.io` v1 and v1beta1): a program prints an ExecCredential on its output.

use std::process::Stdio;
use std::time::Duration;

use base64::Engine;
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::json;

use crate::error::{ClusterError, ClusterResult, ErrorKind};
use crate::kubeconfig::{ClusterConfig, ExecConfig};

/// How long a plugin may take. Go waits without end; a hung plugin would then hold every call.
const DEADLINE: Duration = Duration::from_secs(60);

/// What a plugin gave.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct ExecCredential {
    /// Bearer token.
    pub token: Option<String>,
    /// Client certificate and key, PEM.
    pub certificate: Option<(Vec<u8>, Vec<u8>)>,
    /// When to ask again; None: only after a 401.
    pub expires: Option<Timestamp>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Printed {
    api_version: Option<String>,
    kind: Option<String>,
    status: Option<PrintedStatus>,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct PrintedStatus {
    token: Option<String>,
    client_certificate_data: Option<String>,
    client_key_data: Option<String>,
    expiration_timestamp: Option<Timestamp>,
}

/// Runs the plugin once.
///
/// # Errors
/// It cannot be started, fails, takes longer than a minute, or prints something else; the kind is Unauthorized.
pub async fn run(config: &ExecConfig, cluster: &ClusterConfig) -> ClusterResult<ExecCredential> {
    let name = config.command.display();
    let fail = |message: String| {
        ClusterError::new(format!("get credentials from exec plugin {name}"), ErrorKind::Unauthorized, message)
    };
    let mut spec = json!({"interactive": false});
    if config.provide_cluster_info {
        let ca = match &cluster.ca {
            Some(ca) => Some(ca.read().map_err(|e| fail(format!("read CA {}: {e}", ca.describe())))?),
            None => None,
        };
        let mut info = json!({"server": cluster.server.to_string().trim_end_matches('/')});
        if let Some(ca) = ca {
            info["certificate-authority-data"] = base64::engine::general_purpose::STANDARD.encode(ca).into();
        }
        if cluster.insecure_skip_tls_verify {
            info["insecure-skip-tls-verify"] = true.into();
        }
        if let Some(server_name) = &cluster.tls_server_name {
            info["tls-server-name"] = server_name.as_str().into();
        }
        spec["cluster"] = info;
    }
    let info = json!({"kind": "ExecCredential", "apiVersion": config.api_version, "spec": spec}).to_string();
    let child = tokio::process::Command::new(&config.command)
        .args(&config.args)
        .envs(config.env.iter().map(|(k, v)| (k, v)))
        .env("KUBERNETES_EXEC_INFO", info)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(|e| fail(e.to_string()).advise(config.install_hint.trim()))?;
    let output = tokio::time::timeout(DEADLINE, child.wait_with_output())
        .await
        .map_err(|_| fail(format!("no answer within {} s", DEADLINE.as_secs())))?
        .map_err(|e| fail(e.to_string()))?;
    if !output.status.success() {
        let stderr: String = String::from_utf8_lossy(&output.stderr).chars().take(512).collect();
        return Err(fail(format!("failed with {}: {}", output.status, stderr.trim())));
    }
    parse(&config.api_version, &output.stdout).map_err(fail)
}

fn parse(version: &str, stdout: &[u8]) -> Result<ExecCredential, String> {
    let printed: Printed = serde_json::from_slice(stdout).map_err(|e| format!("decoding stdout: {e}"))?;
    if printed.kind.as_deref() != Some("ExecCredential") {
        return Err(format!("printed kind {:?}, not ExecCredential", printed.kind.unwrap_or_default()));
    }
    if printed.api_version.as_deref() != Some(version) {
        return Err(format!(
            "configured to use API version {version}, plugin returned version {}",
            printed.api_version.unwrap_or_default()
        ));
    }
    let status = printed.status.ok_or("exec plugin didn't return a status field")?;
    let token = status.token.filter(|t| !t.is_empty());
    let certificate = status.client_certificate_data.filter(|s| !s.is_empty());
    let key = status.client_key_data.filter(|s| !s.is_empty());
    let certificate = match (certificate, key) {
        (Some(c), Some(k)) => Some((c.into_bytes(), k.into_bytes())),
        (None, None) => None,
        _ => return Err("exec plugin returned only certificate or key, not both".to_owned()),
    };
    if token.is_none() && certificate.is_none() {
        return Err("exec plugin didn't return a token or cert/key pair".to_owned());
    }
    Ok(ExecCredential { token, certificate, expires: status.expiration_timestamp })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn cluster() -> ClusterConfig {
        let text = "{clusters: [{name: c, cluster: {server: 'https://h:1'}}], contexts: [{name: x, context: {cluster: c}}], current-context: x}";
        ClusterConfig::parse(Path::new("/k"), text).unwrap()
    }

    async fn sh(script: &str) -> ClusterResult<ExecCredential> {
        let config = ExecConfig {
            api_version: "client.authentication.k8s.io/v1".into(),
            command: "/bin/sh".into(),
            args: vec!["-c".into(), script.into()],
            env: vec![("T".into(), "from-env".into())],
            provide_cluster_info: true,
            install_hint: "install it".into(),
        };
        run(&config, &cluster()).await
    }

    #[tokio::test]
    async fn a_token_with_expiry() {
        let got = sh(r#"case "$KUBERNETES_EXEC_INFO" in *'"server":"https://h:1"'*) ;; *) exit 3;; esac
            echo '{"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential","status":{"token":"'$T'","expirationTimestamp":"2030-01-01T00:00:00Z"}}'"#)
        .await
        .unwrap();
        assert_eq!(got.token.as_deref(), Some("from-env"));
        assert_eq!(got.expires, Some("2030-01-01T00:00:00Z".parse().unwrap()));
    }

    #[tokio::test]
    async fn failures_say_what_happened() {
        for (script, word) in [
            ("echo oh no >&2; exit 7", "exit status: 7: oh no"),
            ("echo hello", "decoding stdout"),
            (
                r#"echo '{"apiVersion":"client.authentication.k8s.io/v1beta1","kind":"ExecCredential"}'"#,
                "returned version",
            ),
            (r#"echo '{"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential"}'"#, "status field"),
            (
                r#"echo '{"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential","status":{"clientKeyData":"a"}}'"#,
                "only certificate or key",
            ),
        ] {
            let e = sh(script).await.err().unwrap();
            assert!(e.kind == ErrorKind::Unauthorized && e.message.contains(word), "{script}: {e}");
        }
        let config =
            ExecConfig { command: "/no/such".into(), install_hint: "get it there".into(), ..ExecConfig::default() };
        assert!(run(&config, &cluster()).await.err().unwrap().to_string().contains("get it there"));
    }
}
