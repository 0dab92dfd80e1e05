//! iSCSI through iscsiadm(8), and its sessions and disks in sysfs (`iscsi_host`, drivers/scsi/scsi_transport_iscsi.c).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::{LIMIT, Tools, names, write};
use crate::error::{Attempt, Failed, Result};
use crate::mount_tool::Ended;
use tracing::warn;

/// Rounds over the portals while some are missing.
const ROUNDS: usize = 5;
/// Paths that make a multipath device worth while.
const ENOUGH: usize = 2;
/// How often it is looked for a device.
const LOOK: Duration = Duration::from_millis(100);
/// Ends of iscsiadm(8) that are as good as done: there is such a session; there is none; there is no record.
const SESSION_EXISTS: i32 = 15;
const GONE: [i32; 2] = [2, 21];

/// A logical unit of a target.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Target {
    /// Addresses with ports.
    pub portals: Vec<String>,
    /// Qualified name.
    pub iqn: String,
    /// Logical unit.
    pub lun: i32,
    /// The interface that sessions go over.
    pub interface: String,
    /// The interface that it is made after, and the name of the initiator over it.
    pub made_from: Option<(String, String)>,
}

/// What proves the right to a target, by iscsiadm's names of it (`node.session.auth.username`, …). Not printed.
#[derive(Clone, Default)]
pub struct Chap {
    /// For the discovery.
    pub discovery: Option<BTreeMap<String, String>>,
    /// For the session.
    pub session: Option<BTreeMap<String, String>>,
}

const FIELDS: [&str; 4] = ["username", "password", "username_in", "password_in"];

impl Tools {
    fn iscsiadm(&self, arguments: &[&str]) -> Result<Ended> {
        self.run("iscsiadm", arguments, LIMIT)
    }

    /// Logs in to the target where that is not done yet; the device of the unit.
    ///
    /// # Errors
    /// No portal has led to a device.
    pub fn attach_iscsi(&self, target: &Target, chap: &Chap) -> Result<PathBuf> {
        let base = target.made_from.as_ref().map_or(&target.interface, |(from, _)| from);
        let shown = self.iscsiadm(&["-m", "iface", "-I", base, "-o", "show"])?;
        let shown = shown.done(&format!("iscsi: could not read iface {base}"))?;
        let transport = shown.lines().find_map(|l| l.strip_prefix("iface.transport_name = "));
        let over_tcp = match transport.map(str::trim) {
            None => return Err(Failed::other(format!("could not parse iface file for {base}"), "no transport name")),
            Some(name) => name == "tcp" || name == "<empty>",
        };
        if let Some((_, initiator)) = &target.made_from {
            self.make_interface(&target.interface, &shown, initiator)?;
        }
        let mut devices: BTreeMap<&str, PathBuf> = BTreeMap::new();
        let mut last = None;
        for _ in 0..ROUNDS {
            for portal in &target.portals {
                if devices.contains_key(portal.as_str()) {
                    continue;
                }
                match self.attach_portal(target, portal, chap, over_tcp) {
                    Ok(device) => drop(devices.insert(portal, device)),
                    Err(e) => last = Some(e),
                }
            }
            if devices.is_empty() || devices.len() == target.portals.len() || devices.len() >= ENOUGH {
                break;
            }
        }
        let Some(first) = devices.values().next() else {
            if target.made_from.is_some() {
                let _ = self.iscsiadm(&["-m", "iface", "-I", &target.interface, "-o", "delete"]);
            }
            let last = last.map(|e| e.full()).unwrap_or_default();
            return Err(Failed::other("failed to get any path for iscsi disk", format!("last err seen:\n{last}")));
        };
        // A multipath device takes a moment to appear over several paths; over one there may never be one.
        let until = Instant::now() + if target.portals.len() > 1 { self.patience / 3 } else { Duration::ZERO };
        loop {
            if let Some(over) = devices.values().find_map(|d| self.multipath(d)) {
                return Ok(over);
            }
            if Instant::now() >= until {
                return Ok(first.clone());
            }
            std::thread::sleep(LOOK);
        }
    }

    /// An interface like another one, with the initiator's name.
    fn make_interface(&self, name: &str, like: &str, initiator: &str) -> Result<()> {
        let made = self.iscsiadm(&["-m", "iface", "-I", name, "-o", "new"])?;
        if made.code() != Some(SESSION_EXISTS) {
            made.done("iscsi: failed to create new iface")?;
        }
        let mut fields: BTreeMap<&str, &str> = like
            .lines()
            .filter_map(|l| l.split_once(" = "))
            .filter(|(k, v)| k.starts_with("iface.") && *k != "iface.iscsi_ifacename" && v.trim() != "<empty>")
            .map(|(k, v)| (k, v.trim()))
            .collect();
        fields.insert("iface.initiatorname", initiator);
        for (key, value) in fields {
            let set = self.iscsiadm(&["-m", "iface", "-I", name, "-o", "update", "-n", key, "-v", value])?;
            if let Err(e) = set.done("iscsi: failed to update iface records") {
                let _ = self.iscsiadm(&["-m", "iface", "-I", name, "-o", "delete"]);
                return Err(e);
            }
        }
        Ok(())
    }

    fn attach_portal(&self, target: &Target, portal: &str, chap: &Chap, over_tcp: bool) -> Result<PathBuf> {
        let host = match self.host_of(&target.iqn, portal) {
            Some(host) => host,
            None => {
                self.log_in(target, portal, chap)?;
                let host = self.host_of(&target.iqn, portal);
                host.ok_or_else(|| {
                    Failed::other(format!("find the SCSI host of portal {portal}"), "it has no session")
                })?
            }
        };
        write(&self.sys.join(format!("class/scsi_host/{host}/scan")), &format!("0 0 {}", target.lun))?;
        // Links have addresses without brackets.
        let address = portal.replace(['[', ']'], "");
        let name = format!("ip-{address}-iscsi-{}-lun-{}", target.iqn, target.lun);
        let dir = self.dev.join("disk/by-path");
        let until = Instant::now() + self.patience;
        loop {
            let found = if over_tcp {
                Some(name.clone()).filter(|n| dir.join(n).exists())
            } else {
                // Of other transports the link names the adapter too.
                names(&dir).into_iter().find(|n| n.starts_with("pci-") && n.ends_with(&format!("-{name}")))
            };
            match found {
                Some(link) => return Ok(dir.join(link)),
                None if Instant::now() >= until => {
                    let what = format!(
                        "Timed out waiting for device at path {} after {}s",
                        dir.join(&name).display(),
                        self.patience.as_secs()
                    );
                    return Err(Failed::other(what, "no such device"));
                }
                None => std::thread::sleep(LOOK),
            }
        }
    }

    fn log_in(&self, target: &Target, portal: &str, chap: &Chap) -> Result<()> {
        let interface = target.interface.as_str();
        let discovery = |more: &[&str]| {
            let all = ["-m", "discoverydb", "-t", "sendtargets", "-p", portal, "-I", interface];
            self.iscsiadm(&[&all[..], more].concat())
        };
        let node = |more: &[&str]| {
            let all = ["-m", "node", "-p", portal, "-T", &target.iqn, "-I", interface];
            self.iscsiadm(&[&all[..], more].concat())
        };
        // One that is there already is as good.
        let _ = discovery(&["-o", "new"])?;
        if let Some(secret) = &chap.discovery {
            let set = |key: &str, value: &str| {
                let done = discovery(&["-o", "update", "-n", key, "-v", value])?;
                done.done(&format!("iscsi: failed to update discoverydb key {key:?}")).map(|_| ())
            };
            authenticate("discovery.sendtargets.auth", secret, set)?;
        }
        if let Err(e) = discovery(&["--discover"])?.done(&format!("iscsi: failed to sendtargets to portal {portal}")) {
            let _ = discovery(&["-o", "delete"]);
            return Err(e);
        }
        // Units that are nobody's are not to appear. Old versions do not know this field.
        if let Err(e) =
            node(&["-o", "update", "-n", "node.session.scan", "-v", "manual"])?.done("iscsi: set node.session.scan")
        {
            warn!(err = e.full(), "iscsiadm does not keep other units of the target away");
        }
        if let Some(secret) = &chap.session {
            let set = |key: &str, value: &str| {
                let done = node(&["-o", "update", "-n", key, "-v", value])?;
                done.done(&format!("iscsi: failed to update node session key {key:?}")).map(|_| ())
            };
            authenticate("node.session.auth", secret, set)?;
        }
        let logged_in = node(&["--login"])?;
        if logged_in.code() != Some(SESSION_EXISTS)
            && let Err(e) = logged_in.done("iscsi: failed to attach disk")
        {
            let _ = node(&["-o", "delete"]);
            return Err(e);
        }
        // The node's next start is not to wait for it.
        if let Err(e) = node(&["-o", "update", "-n", "node.startup", "-v", "manual"])?.done("iscsi: set node.startup") {
            warn!(err = e.full(), "iscsiadm logs in to a target of a pod by itself when the node starts");
        }
        Ok(())
    }

    /// The sessions with a target: directory of the session, its SCSI host.
    fn sessions(&self, iqn: &str) -> Vec<(PathBuf, String)> {
        let hosts = self.sys.join("class/iscsi_host");
        let mut all = Vec::new();
        for host in names(&hosts).into_iter().filter(|n| n.starts_with("host")) {
            let device = hosts.join(&host).join("device");
            for session in names(&device).into_iter().filter(|n| n.starts_with("session")) {
                let dir = device.join(&session);
                let name = text(&dir.join("iscsi_session").join(&session).join("targetname"));
                if name.as_deref() == Some(iqn) {
                    all.push((dir, host.clone()));
                }
            }
        }
        all
    }

    /// The SCSI host of the session over this portal.
    fn host_of(&self, iqn: &str, portal: &str) -> Option<String> {
        self.sessions(iqn).into_iter().find_map(|(session, host)| {
            let connections = names(&session).into_iter().filter(|n| n.starts_with("connection"));
            let mut portals = connections.flat_map(|c| {
                let dir = session.join(&c).join("iscsi_connection").join(&c);
                // What was asked for; and where it is, when the portal sent on to another address.
                ["persistent_", ""].map(|kind| {
                    let (address, port) =
                        (text(&dir.join(format!("{kind}address")))?, text(&dir.join(format!("{kind}port")))?);
                    let address = if address.contains(':') { format!("[{address}]") } else { address };
                    Some(format!("{address}:{port}"))
                })
            });
            portals.any(|p| p.as_deref() == Some(portal)).then_some(host)
        })
    }

    /// Takes the unit's disks off the node. Its sessions stay.
    ///
    /// # Errors
    /// A multipath device over them is in use.
    pub fn remove_iscsi_disks(&self, iqn: &str, lun: i32) -> Result<()> {
        let mut disks = Vec::new();
        for (session, _) in self.sessions(iqn) {
            for target in names(&session).into_iter().filter(|n| n.starts_with("target")) {
                let units = session.join(&target);
                // HOST:CHANNEL:TARGET:LUN
                let of_lun = |n: &String| n.rsplit_once(':').is_some_and(|(_, l)| l == lun.to_string());
                for unit in names(&units).into_iter().filter(of_lun) {
                    disks.extend(names(&units.join(&unit).join("block")));
                }
            }
        }
        let over: std::collections::BTreeSet<PathBuf> =
            disks.iter().map(|disk| self.dev.join(disk)).map(|d| self.multipath(&d).unwrap_or(d)).collect();
        over.iter().try_for_each(|device| self.detach(device))?;
        // Where the device has no node (any more), its unit goes all the same.
        disks.iter().try_for_each(|disk| write(&self.sys.join("block").join(disk).join("device/delete"), "1"))
    }

    /// Logs out of the target. One without a session is done.
    ///
    /// # Errors
    /// iscsiadm's.
    pub fn log_out(&self, target: &Target) -> Result<()> {
        for portal in &target.portals {
            let node = ["-m", "node", "-p", portal, "-T", &target.iqn, "-I", &target.interface];
            for (more, what) in [(&["--logout"][..], "detach disk"), (&["-o", "delete"][..], "delete node record")] {
                let ended = self.iscsiadm(&[&node[..], more].concat())?;
                if !ended.code().is_some_and(|c| GONE.contains(&c)) {
                    ended.done(&format!("iscsi: failed to {what}"))?;
                }
            }
        }
        if target.made_from.is_some() {
            let ended = self.iscsiadm(&["-m", "iface", "-I", &target.interface, "-o", "delete"])?;
            if !ended.code().is_some_and(|c| GONE.contains(&c)) {
                ended.done("iscsi: failed to delete iface")?;
            }
        }
        Ok(())
    }
}

/// Tells iscsiadm what proves the right: the method first, then what the secret has of it.
fn authenticate(prefix: &str, secret: &BTreeMap<String, String>, set: impl Fn(&str, &str) -> Result<()>) -> Result<()> {
    set(&format!("{prefix}.authmethod"), "CHAP")?;
    for field in FIELDS {
        let key = format!("{prefix}.{field}");
        if let Some(value) = secret.get(&key).filter(|v| !v.is_empty()) {
            // What was attempted would name the secret.
            set(&key, value).map_err(|e| Failed::other(format!("set {key}"), e.source.to_string()))?;
        }
    }
    Ok(())
}

fn text(file: &Path) -> Option<String> {
    std::fs::read_to_string(file).on("read", file).ok().map(|t| t.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::super::testing::{log, tools};
    use super::*;

    const IQN: &str = "iqn.2001-04.com.example:store";
    /// A stand-in: a login makes a session, a scan is a link of udev's that is there from then on.
    const ISCSIADM: &str = r#"case "$*" in
*"-o show") printf 'iface.iscsi_ifacename = default\niface.transport_name = tcp\niface.net_ifacename = <empty>\n' ;;
*"-p bad:3260"*--discover) echo "cannot connect" >&2; exit 4 ;;
*--login)
    s=sys/class/iscsi_host/host7/device/session1
    mkdir -p $s/iscsi_session/session1 $s/connection1:0/iscsi_connection/connection1:0 $s/target7:0:0/7:0:0:3/block/sdx sys/class/scsi_host/host7 sys/block/sdx/device
    echo iqn.2001-04.com.example:store > $s/iscsi_session/session1/targetname
    echo 10.0.0.1 > $s/connection1:0/iscsi_connection/connection1:0/persistent_address
    echo 3260 > $s/connection1:0/iscsi_connection/connection1:0/persistent_port
    touch sys/class/scsi_host/host7/scan sys/block/sdx/device/delete dev/sdx
    ln -sf ../../sdx dev/disk/by-path/ip-10.0.0.1:3260-iscsi-iqn.2001-04.com.example:store-lun-3 ;;
*--logout) test -e sys/class/iscsi_host/host7 || exit 21; rm -r sys/class/iscsi_host/host7 ;;
esac"#;

    fn target() -> Target {
        Target {
            portals: vec!["10.0.0.1:3260".into()],
            iqn: IQN.into(),
            lun: 3,
            interface: "default".into(),
            made_from: None,
        }
    }

    #[test]
    fn there_and_back() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        let tools = tools(d, &[("iscsiadm", ISCSIADM), ("blockdev", ""), ("multipath", "")]);
        let device = tools.attach_iscsi(&target(), &Chap::default()).unwrap();
        assert_eq!(device, d.join(format!("dev/disk/by-path/ip-10.0.0.1:3260-iscsi-{IQN}-lun-3")));
        assert_eq!(std::fs::read_to_string(d.join("sys/class/scsi_host/host7/scan")).unwrap(), "0 0 3");
        let at = format!("-p 10.0.0.1:3260 -T {IQN} -I default");
        assert_eq!(
            log(d),
            [
                "iscsiadm -m iface -I default -o show".to_owned(),
                "iscsiadm -m discoverydb -t sendtargets -p 10.0.0.1:3260 -I default -o new".to_owned(),
                "iscsiadm -m discoverydb -t sendtargets -p 10.0.0.1:3260 -I default --discover".to_owned(),
                format!("iscsiadm -m node {at} -o update -n node.session.scan -v manual"),
                format!("iscsiadm -m node {at} --login"),
                format!("iscsiadm -m node {at} -o update -n node.startup -v manual"),
            ]
        );
        // A second time, and with a multipath device over it: nobody logs in again.
        std::fs::create_dir_all(d.join("sys/block/dm-3/slaves/sdx")).unwrap();
        std::fs::write(d.join("dev/dm-3"), "").unwrap();
        assert_eq!(tools.attach_iscsi(&target(), &Chap::default()).unwrap(), d.join("dev/dm-3"));
        assert_eq!(log(d).len(), 1);

        tools.remove_iscsi_disks(IQN, 4).unwrap();
        assert!(log(d).is_empty(), "another unit's disks stay");
        tools.remove_iscsi_disks(IQN, 3).unwrap();
        let dm = d.join("dev/dm-3").canonicalize().unwrap();
        assert_eq!(log(d)[0], format!("multipath -f {}", dm.display()));
        assert_eq!(std::fs::read_to_string(d.join("sys/block/sdx/device/delete")).unwrap(), "1");
        tools.log_out(&target()).unwrap();
        tools.log_out(&target()).unwrap();
        assert!(!d.join("sys/class/iscsi_host/host7").exists());
    }

    #[test]
    fn what_fails_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        let tools = tools(d, &[("iscsiadm", ISCSIADM)]);
        let bad = Target { portals: vec!["bad:3260".into()], ..target() };
        let e = tools.attach_iscsi(&bad, &Chap::default()).unwrap_err().full();
        assert!(
            e.starts_with(
                "failed to get any path for iscsi disk: last err seen:\niscsi: failed to sendtargets to portal bad:3260"
            ),
            "{e}"
        );
        assert!(e.contains("cannot connect"), "{e}");
        assert!(log(d).iter().any(|l| l.ends_with("-p bad:3260 -I default -o delete")), "its record goes");
        // One portal of two is enough after all rounds.
        let some = Target { portals: vec!["bad:3260".into(), "10.0.0.1:3260".into()], ..target() };
        assert!(tools.attach_iscsi(&some, &Chap::default()).is_ok());
        let none = Target { lun: 9, ..target() };
        let e = tools.attach_iscsi(&none, &Chap::default()).unwrap_err().full();
        assert!(e.contains("Timed out waiting for device at path"), "{e}");
    }

    #[test]
    fn an_initiators_name_and_secrets() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        let tools = tools(d, &[("iscsiadm", ISCSIADM)]);
        let own = Target {
            interface: "10.0.0.1:3260:pv".into(),
            made_from: Some(("default".into(), "iqn.me".into())),
            ..target()
        };
        let secret = |prefix: &str| {
            BTreeMap::from([
                (format!("{prefix}.username"), "u".to_owned()),
                (format!("{prefix}.password"), "p".to_owned()),
            ])
        };
        let chap =
            Chap { discovery: Some(secret("discovery.sendtargets.auth")), session: Some(secret("node.session.auth")) };
        tools.attach_iscsi(&own, &chap).unwrap();
        let ran = log(d);
        let has = |end: &str| ran.iter().any(|l| l.ends_with(end));
        for end in [
            "-I 10.0.0.1:3260:pv -o new",
            "-o update -n iface.initiatorname -v iqn.me",
            "-o update -n iface.transport_name -v tcp",
            "-n discovery.sendtargets.auth.authmethod -v CHAP",
            "-n discovery.sendtargets.auth.password -v p",
            "-n node.session.auth.username -v u",
        ] {
            assert!(has(end), "{end}: {ran:#?}");
        }
        assert!(!ran.iter().any(|l| l.contains("iscsi_ifacename") || l.contains("net_ifacename")), "{ran:#?}");
        tools.log_out(&own).unwrap();
        assert!(log(d).last().unwrap().ends_with("-m iface -I 10.0.0.1:3260:pv -o delete"));
    }
}
