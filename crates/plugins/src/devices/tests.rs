//! Registration and lists over real sockets, with a fake plugin.

use std::sync::Mutex;

use fakes::FakeDevicePlugin;

use super::*;

const GPU: &str = "example.com/gpu";

/// Writes down what it is told.
#[derive(Default)]
struct Told(Mutex<Vec<String>>);

impl Told {
    fn say(&self, text: String) {
        lock(&self.0).push(text);
    }

    async fn until(&self, wanted: &str) {
        let seen = || lock(&self.0).iter().any(|t| t == wanted);
        for _ in 0..2000 {
            if seen() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{wanted:?} is not among {:?}", lock(&self.0));
    }

    fn count(&self, wanted: &str) -> usize {
        lock(&self.0).iter().filter(|t| *t == wanted).count()
    }
}

impl Listener for Told {
    fn registering(&self, resource: &str) {
        self.say(format!("registering {resource}"));
    }

    fn connected(&self, _: &str, options: Options) {
        self.say(format!("connected {} {}", options.pre_start, options.preferred));
    }

    fn listed(&self, _: &str, devices: BTreeMap<String, Device>) {
        let one = |(id, d): (&String, &Device)| format!("{id}{}{:?}", if d.healthy { "+" } else { "-" }, d.nodes);
        self.say(format!("listed {}", devices.iter().map(one).collect::<Vec<_>>().join(" ")));
    }

    fn disconnected(&self, _: &str) {
        self.say("disconnected".into());
    }

    fn expired(&self, resource: &str) {
        self.say(format!("expired {resource}"));
    }
}

async fn open(dir: &Path, known: &[&str]) -> (DevicePlugins, Arc<Told>, CancellationToken) {
    let (told, stop) = (Arc::new(Told::default()), CancellationToken::new());
    let known = known.iter().map(ToString::to_string);
    let plugins = DevicePlugins::new(dir, told.clone(), known, stop.clone());
    plugins.serve().await.unwrap();
    (plugins, told, stop)
}

fn ids(list: &[&str]) -> Ids {
    list.iter().map(ToString::to_string).collect()
}

#[tokio::test]
async fn a_plugin_comes_lists_and_goes() {
    let dir = tempfile::tempdir().unwrap();
    let (plugins, told, _stop) = open(dir.path(), &[]).await;
    let plugin = FakeDevicePlugin::start(dir.path(), GPU, &[("a", true, -1), ("b", false, 1)], true, true);
    plugin.register().await.unwrap();
    told.until("connected true true").await;
    told.until("listed a+[] b-[1]").await;
    plugin.set(&[("a", false, -1)]);
    told.until("listed a-[]").await;

    let granted = plugins.allocate(GPU, &ids(&["a"])).await.unwrap();
    let facts = facts([(GPU, &*granted)]);
    assert_eq!(facts.envs, [("EXAMPLE_COM_GPU".to_owned(), "a".to_owned())]);
    assert_eq!((facts.devices[0].host_path.as_str(), facts.mounts[0].readonly), ("/dev/null", true));
    assert_eq!(facts.annotations["fake.example.com/devices"], "a");
    assert_eq!(plugins.preferred(GPU, &ids(&["a", "b", "c"]), &ids(&[]), 2).await, Ok(ids(&["b", "c"])));
    plugins.pre_start(GPU, &ids(&["a"])).await.unwrap();
    assert_eq!(plugin.calls(), ["allocate a", "prefer 2 of a,b,c", "prepare a"]);
    plugin.allocate(fakes::Allocate::Refuse("no".into()));
    let refused = plugins.allocate(GPU, &ids(&["a"])).await.unwrap_err();
    assert_eq!(refused, "rpc error: code = Unknown desc = no");

    drop(plugin);
    told.until("disconnected").await;
    assert_eq!(plugins.allocate(GPU, &ids(&["a"])).await.unwrap_err(), "endpoint example.com/gpu has been stopped");
    assert_eq!(plugins.allocate("x/y", &ids(&["a"])).await.unwrap_err(), "unknown Device Plugin x/y");
}

#[tokio::test]
async fn a_plugin_that_registers_anew_takes_the_place_of_the_old_one() {
    let dir = tempfile::tempdir().unwrap();
    let (_plugins, told, _stop) = open(dir.path(), &[]).await;
    let plugin = FakeDevicePlugin::start(dir.path(), GPU, &[("a", true, -1)], false, false);
    plugin.register().await.unwrap();
    told.until("listed a+[]").await;
    let newer = FakeDevicePlugin::start(dir.path(), GPU, &[("n", true, -1)], false, false);
    newer.register().await.unwrap();
    told.until("listed n+[]").await;
    // The end of the old one is not the end of the new one.
    drop(plugin);
    newer.set(&[("n", false, -1)]);
    told.until("listed n-[]").await;
    assert_eq!(told.count("disconnected"), 0);
}

#[tokio::test]
async fn what_cannot_register() {
    let dir = tempfile::tempdir().unwrap();
    let (_plugins, told, _stop) = open(dir.path(), &[]).await;
    let plugin = FakeDevicePlugin::start(dir.path(), GPU, &[], false, false);
    assert_eq!(
        plugin.register_as("v1alpha1", GPU).await.unwrap_err(),
        "requested API version \"v1alpha1\" is not supported by kubelet. Supported version is [\"v1beta1\"]"
    );
    assert_eq!(plugin.register_as(VERSION, "gpu").await.unwrap_err(), "the ResourceName \"gpu\" is invalid");
    assert_eq!(told.count("registering gpu"), 1);
    std::fs::remove_file(dir.path().join("example.com_gpu.sock")).unwrap();
    let gone = plugin.register().await.unwrap_err();
    assert!(gone.contains("failed to get device plugin options"), "{gone}");
}

#[tokio::test]
async fn old_sockets_go_and_files_stay() {
    let dir = tempfile::tempdir().unwrap();
    let old = std::os::unix::net::UnixListener::bind(dir.path().join("old.sock")).unwrap();
    std::fs::write(dir.path().join("kubelet_internal_checkpoint"), "x").unwrap();
    let (_plugins, _, stop) = open(dir.path(), &[]).await;
    drop(old);
    assert!(!dir.path().join("old.sock").exists());
    assert!(dir.path().join("kubelet_internal_checkpoint").exists());
    assert!(dir.path().join(SOCKET).exists());
    // Plugins do not register where there is this file. The Go kubelet has none.
    assert!(!dir.path().join("DEPRECATION").exists());
    stop.cancel();
}

#[tokio::test(start_paused = true)]
async fn who_stays_away_expires() {
    let (told, stop) = (Arc::new(Told::default()), CancellationToken::new());
    let _plugins = DevicePlugins::new(Path::new("/nowhere"), told.clone(), [GPU.to_owned()], stop);
    tokio::time::sleep(STOP_GRACE - Duration::from_secs(1)).await;
    assert_eq!(told.count("expired example.com/gpu"), 0);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(told.count("expired example.com/gpu"), 1);
}
