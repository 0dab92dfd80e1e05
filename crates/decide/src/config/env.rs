//! Variables of a container: `envFrom`, `env` and service links.

use std::collections::{BTreeMap, BTreeSet};

use model::api::{EnvVarSource, Service};
use model::pod::{ContainerEntry, DesiredPod};

use super::error::{ConfigError, Reason};
use super::expand::expand;
use super::facts::ContainerFacts;
use super::go_text::quote;
use super::{downward, env_file};

/// What asking for an object or a file gave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source<T> {
    /// It is there.
    Found(T),
    /// It is not.
    NotFound,
    /// It could not be asked for; the error's text.
    Failed(String),
}

/// Where variables come from. An object that is needed and not listed is a missing fact; [`needed_sources`] names them all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EnvSources {
    /// True when there is no API server: whatever refers to an object of it fails.
    pub standalone: bool,
    /// What [`service_variables`] gave; None: services have not been listed yet (static pods then go without).
    pub services: Option<BTreeMap<String, String>>,
    /// `data` of ConfigMaps of the pod's namespace, by name.
    pub config_maps: BTreeMap<String, Source<BTreeMap<String, String>>>,
    /// `data` of Secrets of the pod's namespace, by name.
    pub secrets: BTreeMap<String, Source<BTreeMap<String, Vec<u8>>>>,
    /// Text of the files of `fileKeyRef`, by volume name and path as the spec writes it.
    pub files: BTreeMap<(String, String), Source<String>>,
}

/// What a container's variables refer to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NeededSources {
    /// ConfigMaps of the pod's namespace.
    pub config_maps: BTreeSet<String>,
    /// Secrets of the pod's namespace.
    pub secrets: BTreeSet<String>,
    /// Files: volume name and path within it. They are opened without leaving the volume.
    pub files: BTreeSet<(String, String)>,
}

/// Everything that must be fetched before [`variables`] can be formed.
pub fn needed_sources(container: ContainerEntry<'_>) -> NeededSources {
    let mut needed = NeededSources::default();
    for from in container.spec.env_from.iter().flatten() {
        if let Some(r) = &from.config_map_ref {
            needed.config_maps.insert(r.name.clone());
        } else if let Some(r) = &from.secret_ref {
            needed.secrets.insert(r.name.clone());
        }
    }
    for var in container.spec.env.iter().flatten().filter(|v| v.value.as_deref().unwrap_or_default().is_empty()) {
        let Some(from) = &var.value_from else { continue };
        if let Some(r) = &from.config_map_key_ref {
            needed.config_maps.insert(r.name.clone());
        }
        if let Some(r) = &from.secret_key_ref {
            needed.secrets.insert(r.name.clone());
        }
        if let Some(r) = &from.file_key_ref {
            needed.files.insert((r.volume_name.clone(), r.path.clone()));
        }
    }
    needed
}

/// Variables in the order in which they were first named.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Variables {
    order: Vec<String>,
    values: BTreeMap<String, String>,
}

impl Variables {
    fn set(&mut self, name: &str, value: String) {
        if self.values.insert(name.to_string(), value).is_none() {
            self.order.push(name.to_string());
        }
    }

    /// The value of a variable.
    pub fn get(&self, name: &str) -> Option<&String> {
        self.values.get(name)
    }

    /// Name and value of each.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.order.iter().filter_map(|name| Some((name.as_str(), self.values.get(name)?.as_str())))
    }
}

/// The variables of a container: `envFrom` in order, a later source over an earlier one; `env` over them; then service variables whose
/// names are free.
///
/// # Errors
/// A source or key that is not there and not optional, a field that cannot be read, a missing fact.
pub fn variables(
    pod: &DesiredPod,
    container: ContainerEntry<'_>,
    facts: &ContainerFacts<'_>,
) -> Result<Variables, ConfigError> {
    if pod.spec().enable_service_links.is_none() {
        return Err(ConfigError::container("nil pod.spec.enableServiceLinks encountered, cannot construct envvars"));
    }
    let none = BTreeMap::new();
    let services = match &facts.env.services {
        Some(services) => services,
        None if pod.is_static() => &none,
        None => {
            return Err(ConfigError::container(
                "services have not yet been read at least once, cannot construct envvars",
            ));
        }
    };

    let mut vars = Variables::default();
    let objects = Objects { pod, env: &facts.env };
    for from in container.spec.env_from.iter().flatten() {
        let prefix = from.prefix.as_deref().unwrap_or_default();
        if let Some(r) = &from.config_map_ref {
            for (key, value) in objects.config_map(&r.name, r.optional)?.into_iter().flatten() {
                vars.set(&format!("{prefix}{key}"), value.clone());
            }
        } else if let Some(r) = &from.secret_ref {
            for (key, value) in objects.secret(&r.name, r.optional)?.into_iter().flatten() {
                vars.set(&format!("{prefix}{key}"), text(value));
            }
        }
    }
    for var in container.spec.env.iter().flatten() {
        let value = match (var.value.as_deref().unwrap_or_default(), &var.value_from) {
            ("", None) => String::new(),
            ("", Some(from)) => match from_source(pod, container, from, facts, &objects)? {
                Some(value) => value,
                None => continue,
            },
            (value, _) => expand(value, |name| vars.get(name).or_else(|| services.get(name)).cloned()),
        };
        vars.set(&var.name, value);
    }
    for (name, value) in services {
        if vars.get(name).is_none() {
            vars.set(name, value.clone());
        }
    }
    Ok(vars)
}

/// A value from elsewhere; None when it is optional and not there.
fn from_source(
    pod: &DesiredPod,
    container: ContainerEntry<'_>,
    from: &EnvVarSource,
    facts: &ContainerFacts<'_>,
    objects: &Objects<'_>,
) -> Result<Option<String>, ConfigError> {
    let no_key = |optional: Option<bool>, message: String| {
        if optional == Some(true) { Ok(None) } else { Err(ConfigError::container(message)) }
    };
    if let Some(r) = &from.field_ref {
        return downward::field(pod, r, facts.node.host_ips.as_deref(), &facts.pod_ips).map(Some);
    }
    if let Some(r) = &from.resource_field_ref {
        return downward::resource_for_env(pod, container, r, facts.node).map(Some);
    }
    if let Some(r) = &from.config_map_key_ref {
        let Some(data) = objects.config_map(&r.name, r.optional)? else { return Ok(None) };
        return match data.get(&r.key) {
            Some(value) => Ok(Some(value.clone())),
            None => {
                no_key(r.optional, format!("couldn't find key {} in ConfigMap {}/{}", r.key, pod.namespace(), r.name))
            }
        };
    }
    if let Some(r) = &from.secret_key_ref {
        let Some(data) = objects.secret(&r.name, r.optional)? else { return Ok(None) };
        return match data.get(&r.key) {
            Some(value) => Ok(Some(text(value))),
            None => no_key(r.optional, format!("couldn't find key {} in Secret {}/{}", r.key, pod.namespace(), r.name)),
        };
    }
    if let Some(r) = from.file_key_ref.as_ref().filter(|_| facts.node.gates.env_files) {
        let Some(volume) = facts.volumes.get(&r.volume_name) else {
            return Err(ConfigError::container(format!(
                "cannot find the volume {} referenced by FileKeyRef",
                quote(&r.volume_name)
            )));
        };
        let file = match facts.env.files.get(&(r.volume_name.clone(), r.path.clone())) {
            None => {
                let fact = format!("file \"{}\" of volume \"{}\"", r.path, r.volume_name);
                return Err(ConfigError::missing(Reason::CreateContainerConfig, fact));
            }
            Some(Source::Found(file)) => file,
            Some(_) => return Err(ConfigError::container("couldn't parse env file")),
        };
        let value = env_file::value_of(file, &r.key).map_err(|_| ConfigError::container("couldn't parse env file"))?;
        if value.is_empty() {
            let dir = match &volume.source {
                super::VolumeSource::HostPath(dir) => dir.as_str(),
                super::VolumeSource::Image(_) => "",
            };
            let path = super::names::join(dir, &r.path);
            return no_key(
                r.optional,
                format!("environment variable key {} not found in file {}", quote(&r.key), quote(&path)),
            );
        }
        return Ok(Some(value));
    }
    Ok(Some(String::new()))
}

/// Secrets are bytes; variables must be text for the runtime's protocol.
fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

struct Objects<'a> {
    pod: &'a DesiredPod,
    env: &'a EnvSources,
}

impl<'a> Objects<'a> {
    fn config_map(
        &self,
        name: &str,
        optional: Option<bool>,
    ) -> Result<Option<&'a BTreeMap<String, String>>, ConfigError> {
        self.object(&self.env.config_maps, name, optional, "configMap", "configmap")
    }

    fn secret(&self, name: &str, optional: Option<bool>) -> Result<Option<&'a BTreeMap<String, Vec<u8>>>, ConfigError> {
        self.object(&self.env.secrets, name, optional, "secret", "secret")
    }

    /// The object; None when it is optional and not there. `kind` is the agent's word, `resource` the API server's.
    fn object<T>(
        &self,
        known: &'a BTreeMap<String, Source<T>>,
        name: &str,
        optional: Option<bool>,
        kind: &str,
        resource: &str,
    ) -> Result<Option<&'a T>, ConfigError> {
        if self.env.standalone {
            let namespace = self.pod.namespace();
            return Err(ConfigError::container(format!(
                "couldn't get {kind} {namespace}/{name}, no kubeClient defined"
            )));
        }
        match known.get(name) {
            None => Err(ConfigError::missing(Reason::CreateContainerConfig, format!("{resource} \"{name}\""))),
            Some(Source::Found(data)) => Ok(Some(data)),
            Some(Source::NotFound) if optional == Some(true) => Ok(None),
            Some(Source::NotFound) => Err(ConfigError::container(format!("{resource} {} not found", quote(name)))),
            Some(Source::Failed(error)) => Err(ConfigError::container(error.clone())),
        }
    }
}

/// The variables that tell a pod of services: always of `default/kubernetes`, with `links` also of the pod's namespace; only of services
/// with a cluster IP.
pub fn service_variables<'a>(
    services: impl IntoIterator<Item = &'a Service>,
    namespace: &str,
    links: bool,
) -> BTreeMap<String, String> {
    // The pod's own namespace wins over `default` when both have a service `kubernetes`.
    let mut chosen: BTreeMap<&str, &Service> = BTreeMap::new();
    for service in services {
        let (name, place) = (service.metadata.name.as_deref(), service.metadata.namespace.as_deref());
        let Some(name) = name.filter(|_| cluster_ip(service).is_some()) else { continue };
        if place == Some("default") && name == "kubernetes" {
            chosen.entry(name).or_insert(service);
        } else if links && place == Some(namespace) {
            chosen.insert(name, service);
        }
    }
    let mut vars = BTreeMap::new();
    for (name, service) in chosen {
        add_service(&mut vars, name, service);
    }
    vars
}

fn cluster_ip(service: &Service) -> Option<&str> {
    service.spec.as_ref()?.cluster_ip.as_deref().filter(|ip| !ip.is_empty() && *ip != "None")
}

fn add_service(vars: &mut BTreeMap<String, String>, name: &str, service: &Service) {
    let variable = |s: &str| s.replace('-', "_").to_uppercase();
    let name = variable(name);
    let ip = cluster_ip(service).unwrap_or_default();
    let address = if ip.contains(':') { format!("[{ip}]") } else { ip.to_string() };
    vars.insert(format!("{name}_SERVICE_HOST"), ip.to_string());
    let ports = service.spec.as_ref().and_then(|s| s.ports.as_deref()).unwrap_or_default();
    for (index, port) in ports.iter().enumerate() {
        let number = port.port.to_string();
        let protocol = port.protocol.as_deref().filter(|p| !p.is_empty()).unwrap_or("TCP");
        let url = format!("{}://{address}:{number}", protocol.to_lowercase());
        if index == 0 {
            vars.insert(format!("{name}_SERVICE_PORT"), number.clone());
            vars.insert(format!("{name}_PORT"), url.clone());
        }
        if let Some(port_name) = port.name.as_deref().filter(|n| !n.is_empty()) {
            vars.insert(format!("{name}_SERVICE_PORT_{}", variable(port_name)), number.clone());
        }
        let prefix = format!("{name}_PORT_{number}_{}", protocol.to_uppercase());
        vars.insert(format!("{prefix}_PROTO"), protocol.to_lowercase());
        vars.insert(format!("{prefix}_PORT"), number);
        vars.insert(format!("{prefix}_ADDR"), ip.to_string());
        vars.insert(prefix, url);
    }
}
