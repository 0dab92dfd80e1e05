//! Asks the runtime. Every question has a deadline, and none changes anything.

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use config::{CgroupDriver, KubeletConfiguration};
use cri::{CriClient, CriError, Outcome, RuntimeReader};
use cri_api::v1;

use super::facts::{Answers, Cni, RuntimeFacts, Seen};

/// How long one question may take; less when runtimeRequestTimeout is less.
const DEADLINE: Duration = Duration::from_secs(5);
/// Where runtimes look for network configurations unless they say otherwise.
const CNI_DIR: &str = "/etc/cni/net.d";

/// Asks the runtime that the configuration names. At most about twice [`DEADLINE`].
pub(super) async fn ask(config: &KubeletConfiguration) -> RuntimeFacts {
    let endpoint = config.container_runtime_endpoint.clone();
    let limit = DEADLINE.min(config.runtime_request_timeout);
    let images = Some(config.image_service_endpoint.as_str());
    let client = match CriClient::connect(&endpoint, images, limit) {
        Ok(client) => client,
        Err(e) => return RuntimeFacts { endpoint, socket: Err(e.to_string()), answers: None },
    };
    let socket = socket(&endpoint);
    let answers = if socket.is_ok() { Some(answers(&client, limit).await) } else { None };
    RuntimeFacts { endpoint, socket, answers }
}

fn socket(endpoint: &str) -> Seen<()> {
    let path = endpoint.strip_prefix("unix:").unwrap_or(endpoint);
    let path = path.strip_prefix("//").unwrap_or(path);
    match fs::metadata(path) {
        Ok(meta) if meta.file_type().is_socket() => Ok(()),
        Ok(_) => Err(format!("{path} is not a socket")),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Err(format!("{path} does not exist")),
        Err(e) => Err(format!("look at {path}: {e}")),
    }
}

/// Gives a question up at its deadline: one that is repeated behind the port could take longer.
async fn within<T>(limit: Duration, question: impl Future<Output = Result<T, CriError>>) -> Result<T, CriError> {
    match tokio::time::timeout(limit, question).await {
        Ok(answer) => answer,
        Err(_) => Err(CriError::timed_out("call", "")),
    }
}

fn text(error: CriError, limit: Duration) -> String {
    // gRPC's DeadlineExceeded.
    if error.code == 4 { format!("no answer within {} s", limit.as_secs_f32().ceil()) } else { error.message }
}

async fn answers(client: &CriClient, limit: Duration) -> Answers {
    let version = within(limit, client.version()).await.and_then(|answer| match cri::validate_version(&answer) {
        Ok(()) => Ok(answer),
        Err(why) => Err(CriError::answered("Version", "", 0, why)),
    });
    let no_cni = Cni { dir: CNI_DIR.into(), files: Ok(Vec::new()) };
    let version = match version {
        Ok(version) => version,
        // Not even the simplest question is answered: the others would only take their time.
        Err(e) => {
            let why = text(e, limit);
            return Answers {
                version: Err(why.clone()),
                status: Err(why.clone()),
                driver: Err(why.clone()),
                sandboxes: Err(why.clone()),
                containers: Err(why),
                image_place: None,
                cni: no_cni,
            };
        }
    };
    let (status, driver, sandboxes, containers, images) = tokio::join!(
        within(limit, client.status(true)),
        within(limit, client.runtime_config()),
        timed(within(limit, client.list_pod_sandbox(None))),
        timed(within(limit, client.list_containers(None))),
        within(limit, client.image_fs_info()),
    );
    let image_place = images.ok().and_then(|fs| fs.image_filesystems.into_iter().next()?.fs_id);
    let config = status.as_ref().ok().and_then(own_config);
    Answers {
        version: Ok(version),
        driver: match driver {
            Ok(answer) => Ok(answer.linux.map(|l| match l.cgroup_driver() {
                v1::CgroupDriver::Systemd => CgroupDriver::Systemd,
                v1::CgroupDriver::Cgroupfs => CgroupDriver::Cgroupfs,
            })),
            // containerd before 2.0 cannot be asked, but shows its configuration.
            Err(e) if e.outcome == Outcome::Unimplemented => Ok(config.as_ref().and_then(shown_driver)),
            Err(e) => Err(text(e, limit)),
        },
        cni: cni(config.as_ref()),
        status: status.map_err(|e| text(e, limit)),
        sandboxes: sandboxes.map_err(|e| text(e, limit)),
        containers: containers.map_err(|e| text(e, limit)),
        image_place: image_place.map(|id| PathBuf::from(id.mountpoint)),
    }
}

/// How many, and how long the list took.
async fn timed<T>(list: impl Future<Output = Result<Vec<T>, CriError>>) -> Result<(usize, Duration), CriError> {
    let start = Instant::now();
    let list = list.await?;
    Ok((list.len(), start.elapsed()))
}

/// The runtime's own configuration, as containerd shows it in a verbose Status.
fn own_config(status: &v1::StatusResponse) -> Option<serde_json::Value> {
    serde_json::from_str(status.info.get("config")?).ok()
}

/// The cgroup driver of containerd's default runtime; it is cgroupfs unless SystemdCgroup says otherwise.
fn shown_driver(config: &serde_json::Value) -> Option<CgroupDriver> {
    let containerd = config.get("containerd")?;
    let name = containerd.get("defaultRuntimeName")?.as_str()?;
    let options = containerd.get("runtimes")?.get(name)?.get("options");
    let systemd = options.and_then(|o| o.get("SystemdCgroup")).and_then(serde_json::Value::as_bool);
    Some(if systemd == Some(true) { CgroupDriver::Systemd } else { CgroupDriver::Cgroupfs })
}

fn cni(config: Option<&serde_json::Value>) -> Cni {
    let shown = config.and_then(|c| c.pointer("/cni/confDir")).and_then(serde_json::Value::as_str);
    let dir = PathBuf::from(shown.filter(|d| !d.is_empty()).unwrap_or(CNI_DIR));
    Cni { files: network_files(&dir), dir }
}

fn network_files(dir: &Path) -> Seen<Vec<String>> {
    let entries = fs::read_dir(dir).map_err(|e| format!("list {}: {e}", dir.display()))?;
    let names = entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned());
    let network = |n: &String| [".conf", ".conflist", ".json"].iter().any(|end| n.ends_with(end));
    let mut names: Vec<String> = names.filter(network).collect();
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_containerd_shows_of_itself() {
        let shown = |options: &str| {
            let text = format!(
                r#"{{"containerd":{{"defaultRuntimeName":"runc","runtimes":{{"runc":{{"options":{options}}}}}}},"cni":{{"confDir":"/x/net.d"}}}}"#
            );
            serde_json::from_str::<serde_json::Value>(&text).unwrap()
        };
        assert_eq!(shown_driver(&shown(r#"{"SystemdCgroup":true}"#)), Some(CgroupDriver::Systemd));
        assert_eq!(shown_driver(&shown(r#"{"SystemdCgroup":false}"#)), Some(CgroupDriver::Cgroupfs));
        assert_eq!(shown_driver(&shown("null")), Some(CgroupDriver::Cgroupfs));
        assert_eq!(shown_driver(&serde_json::json!({"crio": {}})), None);
        assert_eq!(cni(Some(&shown("{}"))).dir, Path::new("/x/net.d"));
        assert_eq!(cni(None).dir, Path::new(CNI_DIR));
    }

    #[test]
    fn network_configurations() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["20-b.conf", "10-a.conflist", "README", ".kept"] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        assert_eq!(network_files(dir.path()).unwrap(), ["10-a.conflist", "20-b.conf"]);
        assert!(network_files(&dir.path().join("missing")).is_err());
    }

    #[tokio::test]
    async fn a_runtime_that_is_not_there() {
        let dir = tempfile::tempdir().unwrap();
        let ask_at = async |path: &Path| {
            let endpoint = format!("unix://{}", path.display());
            ask(&KubeletConfiguration { container_runtime_endpoint: endpoint, ..Default::default() }).await
        };
        let path = dir.path().join("c.sock");
        let missing = ask_at(&path).await;
        assert_eq!(missing.socket, Err(format!("{} does not exist", path.display())));
        assert!(missing.answers.is_none());

        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        assert_eq!(ask_at(&file).await.socket, Err(format!("{} is not a socket", file.display())));

        // A socket that nobody listens on any more.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let dead = ask_at(&path).await;
        assert_eq!(dead.socket, Ok(()));
        let version = dead.answers.unwrap().version.unwrap_err();
        assert!(version.contains("connection refused"), "{version}");

        let wrong = KubeletConfiguration { container_runtime_endpoint: "tcp://x".into(), ..Default::default() };
        assert!(ask(&wrong).await.socket.unwrap_err().contains("only support unix socket endpoint"));
    }

    #[tokio::test]
    async fn a_runtime_that_hangs() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.sock");
        let _held = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let config = KubeletConfiguration {
            container_runtime_endpoint: format!("unix://{}", path.display()),
            runtime_request_timeout: Duration::from_millis(50),
            ..Default::default()
        };
        let answers = ask(&config).await.answers.unwrap();
        assert_eq!(answers.version, Err("no answer within 1 s".to_owned()));
    }
}
