//! CredentialProviderConfig (`--image-credential-provider-config`): a file, or a directory of `.json`, `.yaml` and `.yml` files in the order of
//! their names.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

/// Versions of the configuration.
const CONFIG_VERSIONS: [&str; 3] =
    ["kubelet.config.k8s.io/v1", "kubelet.config.k8s.io/v1beta1", "kubelet.config.k8s.io/v1alpha1"];
/// Versions of the exec API.
const V1: &str = "credentialprovider.kubelet.k8s.io/v1";
const EXEC_VERSIONS: [&str; 3] =
    [V1, "credentialprovider.kubelet.k8s.io/v1alpha1", "credentialprovider.kubelet.k8s.io/v1beta1"];

/// One plugin.
#[derive(Clone, Debug)]
pub(crate) struct Provider {
    /// The program's name in the plugin directory.
    pub(crate) name: String,
    /// Images that it is asked about: places as in [`decide::credentials::place_matches`].
    pub(crate) match_images: Vec<String>,
    /// How long an answer without a duration of its own is kept.
    pub(crate) default_cache_duration: Duration,
    /// Version of the exec API.
    pub(crate) api_version: String,
    /// Arguments.
    pub(crate) args: Vec<String>,
    /// Variables in addition to the agent's own.
    pub(crate) env: BTreeMap<String, String>,
    /// It wants a token of the pod's service account.
    pub(crate) token: Option<TokenAttributes>,
}

/// `tokenAttributes` (KEP-4412).
#[derive(Clone, Debug)]
pub(crate) struct TokenAttributes {
    /// Audience of the token.
    pub(crate) audience: String,
    /// Answers are kept per token, not per service account.
    pub(crate) per_token: bool,
    /// Pods without a service account get nothing from it.
    pub(crate) require_account: bool,
    /// Annotations that the account must have; they are given to the plugin.
    pub(crate) required_annotations: Vec<String>,
    /// Annotations that are given to it when they are there.
    pub(crate) optional_annotations: Vec<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct WireConfig {
    kind: String,
    api_version: String,
    #[serde(default)]
    providers: Vec<WireProvider>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct WireProvider {
    #[serde(default)]
    name: String,
    #[serde(default)]
    match_images: Vec<String>,
    default_cache_duration: Option<String>,
    #[serde(default)]
    api_version: String,
    args: Option<Vec<String>>,
    env: Option<Vec<WireEnv>>,
    token_attributes: Option<WireToken>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WireEnv {
    name: String,
    #[serde(default)]
    value: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct WireToken {
    #[serde(default)]
    service_account_token_audience: String,
    #[serde(default)]
    cache_type: String,
    require_service_account: Option<bool>,
    required_service_account_annotation_keys: Option<Vec<String>>,
    optional_service_account_annotation_keys: Option<Vec<String>>,
}

/// Reads the plugins' configuration and finds each program in `bin`. `tokens`: gate KubeletServiceAccountTokenForCredentialProviders.
///
/// # Errors
/// Says which file or field is at fault; the agent does not start then.
pub(crate) fn load(config: &Path, bin: &Path, tokens: bool) -> Result<Vec<Provider>, String> {
    if !bin.exists() {
        return Err(format!("plugin binary directory {} did not exist", bin.display()));
    }
    let mut providers: Vec<Provider> = Vec::new();
    for path in files(config)? {
        let text = std::fs::read_to_string(&path).map_err(|e| format!("unable to read file {path:?}: {e}"))?;
        let wire = parse(&text).map_err(|e| format!("error decoding config {path:?}: {e}"))?;
        for provider in wire.providers {
            let name = provider.name.clone();
            if providers.iter().any(|p| p.name == name) {
                return Err(format!("duplicate provider name {name:?} found in configuration file(s)"));
            }
            let checked = check(provider, tokens);
            providers.push(checked.map_err(|e| format!("failed to validate credential provider config: {e}"))?);
        }
    }
    if providers.is_empty() {
        return Err("failed to validate credential provider config: providers: Required value: at least 1 item in \
                    plugins is required"
            .to_owned());
    }
    for provider in &providers {
        let program = bin.join(&provider.name);
        let runs = std::fs::metadata(&program).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0);
        if !runs {
            return Err(format!("plugin binary executable {} did not exist", program.display()));
        }
    }
    Ok(providers)
}

fn files(config: &Path) -> Result<Vec<PathBuf>, String> {
    if !config.is_dir() {
        return Ok(vec![config.to_owned()]);
    }
    let unable = |e: std::io::Error| format!("unable to read directory {config:?}: {e}");
    let mut files = Vec::new();
    for entry in std::fs::read_dir(config).map_err(unable)? {
        let path = entry.map_err(unable)?.path();
        let wanted = path.extension().is_some_and(|e| e == "json" || e == "yaml" || e == "yml");
        if wanted && !path.is_dir() {
            files.push(path);
        }
    }
    files.sort();
    if files.is_empty() {
        return Err(format!("no configuration files found in directory {config:?}"));
    }
    Ok(files)
}

fn parse(text: &str) -> Result<WireConfig, String> {
    let wire: WireConfig = serde_saphyr::from_str(text).map_err(|e| e.to_string())?;
    if wire.kind != "CredentialProviderConfig" {
        return Err(format!("failed to decode {:?} (wrong Kind)", wire.kind));
    }
    if !CONFIG_VERSIONS.contains(&wire.api_version.as_str()) {
        return Err(format!("no kind \"CredentialProviderConfig\" is registered for version {:?}", wire.api_version));
    }
    Ok(wire)
}

fn check(wire: WireProvider, tokens: bool) -> Result<Provider, String> {
    let name = wire.name;
    if name.is_empty() || name.contains(['/', ' ']) || name == "." || name == ".." {
        return Err(format!(
            "providers.name: Invalid value: {name:?}: must be the name of a file, without '/' and spaces"
        ));
    }
    if !EXEC_VERSIONS.contains(&wire.api_version.as_str()) {
        return Err(format!(
            "providers.apiVersion: Unsupported value: {:?}: supported values: \"{}\"",
            wire.api_version,
            EXEC_VERSIONS.join("\", \"")
        ));
    }
    if wire.match_images.is_empty() {
        return Err("providers.matchImages: Required value: at least 1 item in matchImages is required".to_owned());
    }
    let duration = wire.default_cache_duration.ok_or("providers.defaultCacheDuration: Required value")?;
    let default_cache_duration = ::config::duration::parse(&duration)
        .map_err(|e| format!("providers.defaultCacheDuration: Invalid value: {duration:?}: {e}"))?;
    let token = wire.token_attributes.map(|t| check_token(t, &wire.api_version, tokens)).transpose()?;
    Ok(Provider {
        name,
        match_images: wire.match_images,
        default_cache_duration,
        api_version: wire.api_version,
        args: wire.args.unwrap_or_default(),
        env: wire.env.unwrap_or_default().into_iter().map(|e| (e.name, e.value)).collect(),
        token,
    })
}

fn check_token(wire: WireToken, version: &str, tokens: bool) -> Result<TokenAttributes, String> {
    let at = "providers.tokenAttributes";
    if !tokens {
        return Err(format!(
            "{at}: Forbidden: tokenAttributes is not supported when KubeletServiceAccountTokenForCredentialProviders \
             feature gate is disabled"
        ));
    }
    if version != V1 {
        return Err(format!("{at}: Forbidden: tokenAttributes is only supported for {V1} API version"));
    }
    if wire.service_account_token_audience.is_empty() {
        return Err(format!("{at}.serviceAccountTokenAudience: Required value"));
    }
    let require_account =
        wire.require_service_account.ok_or_else(|| format!("{at}.requireServiceAccount: Required value"))?;
    let required = wire.required_service_account_annotation_keys.unwrap_or_default();
    let optional = wire.optional_service_account_annotation_keys.unwrap_or_default();
    if !require_account && !required.is_empty() {
        return Err(format!(
            "{at}.requiredServiceAccountAnnotationKeys: Forbidden: requireServiceAccount cannot be false when \
             requiredServiceAccountAnnotationKeys is set"
        ));
    }
    let mut seen = BTreeSet::new();
    if let Some(twice) = required.iter().chain(&optional).find(|key| !seen.insert(*key)) {
        return Err(format!(
            "{at}: Invalid value: {twice:?}: an annotation key may be named once, required or optional"
        ));
    }
    let per_token = match wire.cache_type.as_str() {
        "Token" => true,
        "ServiceAccount" => false,
        other => {
            return Err(format!(
                "{at}.cacheType: Unsupported value: {other:?}: supported values: \"ServiceAccount\", \"Token\""
            ));
        }
    };
    Ok(TokenAttributes {
        audience: wire.service_account_token_audience,
        per_token,
        require_account,
        required_annotations: required,
        optional_annotations: optional,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "
kind: CredentialProviderConfig
apiVersion: kubelet.config.k8s.io/v1
providers:
- name: cloud
  apiVersion: credentialprovider.kubelet.k8s.io/v1
  matchImages: ['*.reg.test', 'reg.test:5000/team']
  defaultCacheDuration: 12h
  args: [get, --quick]
  env: [{name: A, value: b}]
  tokenAttributes:
    serviceAccountTokenAudience: reg
    cacheType: Token
    requireServiceAccount: true
    requiredServiceAccountAnnotationKeys: [a.test/id]
";

    fn one(text: &str, tokens: bool) -> Result<Provider, String> {
        parse(text).and_then(|mut c| check(c.providers.remove(0), tokens))
    }

    #[test]
    fn a_full_provider() {
        let p = one(GOOD, true).unwrap();
        assert_eq!((p.name.as_str(), p.args.len(), p.env["A"].as_str()), ("cloud", 2, "b"));
        assert_eq!(p.default_cache_duration, Duration::from_secs(12 * 3600));
        let token = p.token.unwrap();
        assert_eq!((token.audience.as_str(), token.per_token, token.require_account), ("reg", true, true));
        assert_eq!(token.required_annotations, ["a.test/id"]);
    }

    #[test]
    fn faults_are_named() {
        for (from, to, word) in [
            ("kind: CredentialProviderConfig", "kind: Other", "wrong Kind"),
            ("kubelet.config.k8s.io/v1", "kubelet.config.k8s.io/v9", "is registered for version"),
            ("name: cloud", "name: a/b", "providers.name"),
            ("apiVersion: credentialprovider.kubelet.k8s.io/v1\n", "apiVersion: x\n", "providers.apiVersion"),
            ("['*.reg.test', 'reg.test:5000/team']", "[]", "providers.matchImages"),
            ("defaultCacheDuration: 12h", "defaultCacheDuration: often", "providers.defaultCacheDuration"),
            ("  defaultCacheDuration: 12h\n", "", "providers.defaultCacheDuration: Required"),
            ("cacheType: Token", "cacheType: None", "cacheType"),
            ("requireServiceAccount: true", "requireServiceAccount: false", "cannot be false"),
            ("serviceAccountTokenAudience: reg", "serviceAccountTokenAudience: ''", "serviceAccountTokenAudience"),
            ("args: [get, --quick]", "argz: [get]", "argz"),
        ] {
            let text = GOOD.replace(from, to);
            assert_ne!(text, GOOD, "{from}");
            let fault = one(&text, true).unwrap_err();
            assert!(fault.contains(word), "{to}: {fault}");
        }
        assert!(one(GOOD, false).unwrap_err().contains("feature gate is disabled"));
    }

    #[test]
    fn files_and_programs() {
        let dir = tempfile::tempdir().unwrap();
        let (conf, bin) = (dir.path().join("conf"), dir.path().join("bin"));
        std::fs::create_dir(&conf).unwrap();
        let fault = |c: &Path| load(c, &bin, true).unwrap_err();
        assert!(fault(&conf).contains("did not exist"));
        std::fs::create_dir(&bin).unwrap();
        assert!(fault(&conf).contains("no configuration files found"));
        std::fs::write(conf.join("b.yaml"), GOOD).unwrap();
        std::fs::write(conf.join("readme.txt"), "x").unwrap();
        let program = bin.join("cloud");
        assert_eq!(fault(&conf), format!("plugin binary executable {} did not exist", program.display()));
        std::fs::write(&program, "").unwrap();
        assert!(fault(&conf).contains("did not exist"), "not executable");
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(load(&conf, &bin, true).unwrap().len(), 1);
        assert_eq!(load(&conf.join("b.yaml"), &bin, true).unwrap().len(), 1);
        std::fs::write(conf.join("a.json"), GOOD).unwrap();
        assert_eq!(fault(&conf), "duplicate provider name \"cloud\" found in configuration file(s)");
    }
}
