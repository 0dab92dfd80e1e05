//! Which ConfigMaps and Secrets a pod names, and the files that they become in its volumes.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use model::api::{ConfigMap, KeyToPath, Secret};
use model::pod::{ContainerEntry, DesiredPod};

use super::env::needed_sources;

/// Names of objects of the pod's namespace, each with true when a volume shows it (it must then be followed).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct References {
    /// ConfigMaps.
    pub config_maps: BTreeMap<String, bool>,
    /// Secrets, those for pulls among them.
    pub secrets: BTreeMap<String, bool>,
}

/// What a pod names in volumes, variables and `imagePullSecrets`.
pub fn references(pod: &DesiredPod) -> References {
    let mut refs = References::default();
    let add = |names: &mut BTreeMap<String, bool>, name: &str, in_volume: bool| {
        if !name.is_empty() {
            *names.entry(name.to_owned()).or_default() |= in_volume;
        }
    };
    for container in pod.containers() {
        let needed = needed_sources(container);
        needed.config_maps.iter().for_each(|n| add(&mut refs.config_maps, n, false));
        needed.secrets.iter().for_each(|n| add(&mut refs.secrets, n, false));
    }
    for secret in pod.spec().image_pull_secrets.iter().flatten() {
        add(&mut refs.secrets, &secret.name, false);
    }
    for volume in pod.spec().volumes.iter().flatten() {
        if let Some(map) = &volume.config_map {
            add(&mut refs.config_maps, &map.name, true);
        }
        if let Some(secret) = &volume.secret {
            add(&mut refs.secrets, secret.secret_name.as_deref().unwrap_or_default(), true);
        }
        for source in volume.projected.iter().flat_map(|p| p.sources.iter().flatten()) {
            if let Some(map) = &source.config_map {
                add(&mut refs.config_maps, &map.name, true);
            }
            if let Some(secret) = &source.secret {
                add(&mut refs.secrets, &secret.name, true);
            }
        }
    }
    refs
}

/// One file of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeFile {
    /// Content.
    pub data: Vec<u8>,
    /// Permission bits.
    pub mode: u32,
    /// Owner, when it is not root.
    pub uid: Option<u32>,
}

/// Files of a volume by relative path.
pub type VolumeFiles = BTreeMap<String, VolumeFile>;

/// Mode of files when the volume's source has none.
pub const DEFAULT_MODE: i32 = 0o644;

/// Files of a ConfigMap: all keys, or those that `items` name. None: it is optional and not there.
///
/// # Errors
/// An item names a key that is not there, unless optional.
pub fn config_map_files(
    map: Option<&ConfigMap>,
    items: Option<&[KeyToPath]>,
    default_mode: i32,
    optional: bool,
) -> Result<VolumeFiles, String> {
    let text = map.and_then(|m| m.data.as_ref());
    let binary = map.and_then(|m| m.binary_data.as_ref());
    let get = |key: &str| {
        let text = text.and_then(|t| t.get(key)).map(|t| t.as_bytes());
        text.or_else(|| binary.and_then(|b| b.get(key)).map(|b| b.0.as_slice()))
    };
    let all = text.into_iter().flat_map(|t| t.keys()).chain(binary.into_iter().flat_map(|b| b.keys()));
    files(all, get, items, default_mode, |key| match optional {
        true => None,
        false => Some(format!("configmap references non-existent config key: {key}")),
    })
}

/// Files of a Secret, as [`config_map_files`].
///
/// # Errors
/// An item names a key that is not there, unless optional.
pub fn secret_files(
    secret: Option<&Secret>,
    items: Option<&[KeyToPath]>,
    default_mode: i32,
    optional: bool,
) -> Result<VolumeFiles, String> {
    let data = secret.and_then(|s| s.data.as_ref());
    let get = |key: &str| data.and_then(|d| d.get(key)).map(|b| b.0.as_slice());
    files(data.into_iter().flat_map(|d| d.keys()), get, items, default_mode, |key| match optional {
        true => None,
        false => Some(format!("references non-existent secret key: {key}")),
    })
}

fn files<'a>(
    all: impl Iterator<Item = &'a String>,
    get: impl Fn(&str) -> Option<&'a [u8]>,
    items: Option<&[KeyToPath]>,
    default_mode: i32,
    missing: impl Fn(&str) -> Option<String>,
) -> Result<VolumeFiles, String> {
    let file = |data: &[u8], mode: i32| VolumeFile { data: data.to_vec(), mode: mode as u32, uid: None };
    let items = items.unwrap_or_default();
    if items.is_empty() {
        return Ok(all.filter_map(|key| Some((key.clone(), file(get(key)?, default_mode)))).collect());
    }
    let mut files = VolumeFiles::new();
    for item in items {
        match get(&item.key) {
            Some(data) => {
                files.insert(item.path.clone(), file(data, item.mode.unwrap_or(default_mode)));
            }
            None => {
                if let Some(fault) = missing(&item.key) {
                    return Err(fault);
                }
            }
        }
    }
    Ok(files)
}

/// Whom token files belong to: the user that all init and app containers run as, if they all name the same one.
pub fn file_user(pod: &DesiredPod) -> Option<u32> {
    let of_pod = pod.spec().security_context.as_ref().and_then(|c| c.run_as_user);
    let user = |c: ContainerEntry<'_>| c.spec.security_context.as_ref().and_then(|s| s.run_as_user).or(of_pod);
    let mut users = pod.init_containers().chain(pod.app_containers()).map(user);
    let first = users.next()??;
    users.all(|u| u == Some(first)).then(|| u32::try_from(first).ok()).flatten()
}

/// Mode of token and trust anchor files: only the owner's where there is one, or where the group is added by fsGroup.
pub fn token_mode(pod: &DesiredPod, default_mode: i32) -> u32 {
    let has_group = pod.spec().security_context.as_ref().is_some_and(|c| c.fs_group.is_some());
    if has_group || file_user(pod).is_some() { 0o600 } else { default_mode as u32 }
}

/// The UID of the ServiceAccount that a token is for, as its claims say. They are not verified: the token came from the API server.
pub fn account_uid(token: &str) -> Option<String> {
    let claims = token.split('.').nth(1)?;
    let claims: serde_json::Value = serde_json::from_slice(&URL_SAFE_NO_PAD.decode(claims).ok()?).ok()?;
    claims.pointer("/kubernetes.io/serviceaccount/uid")?.as_str().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::pod;

    #[test]
    fn the_account_of_a_token() {
        let token = |claims: &str| format!("x.{}.y", URL_SAFE_NO_PAD.encode(claims));
        let of = |claims: &str| account_uid(&token(claims));
        assert_eq!(of(r#"{"kubernetes.io":{"serviceaccount":{"name":"sa","uid":"u1"}}}"#), Some("u1".to_owned()));
        for other in ["{}", "[]", "no", r#"{"kubernetes.io":{"serviceaccount":{"uid":7}}}"#] {
            assert_eq!(of(other), None, "{other}");
        }
        for other in ["", "opaque", "a.!!.c"] {
            assert_eq!(account_uid(other), None, "{other}");
        }
    }

    fn items(text: &str) -> Vec<KeyToPath> {
        serde_json::from_str(text).unwrap()
    }

    fn shown(files: Result<VolumeFiles, String>) -> Result<Vec<(String, String, u32)>, String> {
        let text = |d: Vec<u8>| String::from_utf8(d).unwrap();
        files.map(|f| f.into_iter().map(|(p, f)| (p, text(f.data), f.mode)).collect())
    }

    #[test]
    fn files_of_a_config_map() {
        let map: ConfigMap = serde_json::from_str(r#"{"data":{"a":"1","b":"2"},"binaryData":{"c":"Mw=="}}"#).unwrap();
        let own = |p: &str, d: &str, m| (p.to_owned(), d.to_owned(), m);
        assert_eq!(
            shown(config_map_files(Some(&map), None, 0o640, false)),
            Ok(vec![own("a", "1", 0o640), own("b", "2", 0o640), own("c", "3", 0o640)])
        );
        let some = items(r#"[{"key":"c","path":"x/y","mode":256},{"key":"a","path":"z"}]"#);
        assert_eq!(
            shown(config_map_files(Some(&map), Some(&some), 0o644, false)),
            Ok(vec![own("x/y", "3", 0o400), own("z", "1", 0o644)])
        );
        let bad = items(r#"[{"key":"no","path":"x"},{"key":"b","path":"b"}]"#);
        assert_eq!(
            shown(config_map_files(Some(&map), Some(&bad), 0o644, false)),
            Err("configmap references non-existent config key: no".into())
        );
        assert_eq!(shown(config_map_files(Some(&map), Some(&bad), 0o644, true)), Ok(vec![own("b", "2", 0o644)]));
        assert_eq!(shown(config_map_files(None, Some(&bad), 0o644, true)), Ok(vec![]));
    }

    #[test]
    fn files_of_a_secret() {
        let secret: Secret = serde_json::from_str(r#"{"data":{"k":"dg=="}}"#).unwrap();
        assert_eq!(
            shown(secret_files(Some(&secret), None, 0o400, false)),
            Ok(vec![("k".to_owned(), "v".to_owned(), 0o400)])
        );
        let bad = items(r#"[{"key":"no","path":"x"}]"#);
        assert_eq!(
            shown(secret_files(Some(&secret), Some(&bad), 0o400, false)),
            Err("references non-existent secret key: no".into())
        );
    }

    #[test]
    fn owner_and_mode_of_tokens() {
        for (spec, user, mode) in [
            (r#"{"containers":[{"name":"a"}]}"#, None, 0o644),
            (r#"{"securityContext":{"runAsUser":7},"containers":[{"name":"a"},{"name":"b"}]}"#, Some(7), 0o600),
            (r#"{"containers":[{"name":"a","securityContext":{"runAsUser":7}},{"name":"b"}]}"#, None, 0o644),
            (
                r#"{"securityContext":{"runAsUser":7},"containers":[{"name":"a","securityContext":{"runAsUser":8}},{"name":"b"}]}"#,
                None,
                0o644,
            ),
            (r#"{"securityContext":{"fsGroup":9},"containers":[{"name":"a"}]}"#, None, 0o600),
            (
                r#"{"initContainers":[{"name":"i","securityContext":{"runAsUser":1}}],"containers":[{"name":"a","securityContext":{"runAsUser":1}}]}"#,
                Some(1),
                0o600,
            ),
        ] {
            let pod = pod(spec);
            assert_eq!((file_user(&pod), token_mode(&pod, 0o644)), (user, mode), "{spec}");
        }
    }

    #[test]
    fn what_a_pod_names() {
        let pod = pod(r#"{"imagePullSecrets":[{"name":"pull"},{"name":""}],
            "initContainers":[{"name":"i","envFrom":[{"configMapRef":{"name":"env"}}]}],
            "containers":[{"name":"a","env":[{"name":"X","valueFrom":{"secretKeyRef":{"name":"both","key":"k"}}},
                {"name":"Y","value":"set","valueFrom":{"secretKeyRef":{"name":"unused","key":"k"}}}]}],
            "volumes":[{"name":"v","configMap":{"name":"cm"}},{"name":"s","secret":{"secretName":"both"}},
                {"name":"p","projected":{"sources":[{"configMap":{"name":"pcm"}},{"secret":{"name":"ps"}}]}}]}"#);
        let names = |list: &[(&str, bool)]| list.iter().map(|(n, v)| ((*n).to_owned(), *v)).collect();
        assert_eq!(
            references(&pod),
            References {
                config_maps: names(&[("cm", true), ("env", false), ("pcm", true)]),
                secrets: names(&[("both", true), ("ps", true), ("pull", false)]),
            }
        );
    }
}
