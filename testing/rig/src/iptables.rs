//! The nat rules that the CNI plugins make for one network, taken out again.

use std::collections::BTreeSet;
use std::io::Write;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// The chains that the portmap plugin makes once for the host and keeps.
const HOST_PORT: [&str; 3] = ["CNI-HOSTPORT-DNAT", "CNI-HOSTPORT-MASQ", "CNI-HOSTPORT-SETMARK"];

fn save() -> Option<String> {
    let out = Command::new(crate::find_program("iptables-save")?).args(["-t", "nat"]).output().ok()?;
    out.status.success().then(|| String::from_utf8_lossy(&out.stdout).into_owned())
}

/// True when the portmap plugin's own chains are there already.
pub fn has_host_port_chains() -> bool {
    save().is_some_and(|s| s.contains(":CNI-HOSTPORT-"))
}

/// Removes the rules and chains of the CNI network `network`; with `host_port` also the portmap plugin's chains, if no rule of
/// another network is in them. Does nothing on a host without iptables.
///
/// # Errors
/// When iptables refuses.
pub fn remove(network: &str, host_port: bool) -> Result<()> {
    let Some(saved) = save() else { return Ok(()) };
    let Some(input) = plan(&saved, network, host_port) else {
        return Ok(());
    };
    let program = crate::find_program("iptables-restore").context("no iptables-restore beside iptables-save")?;
    let mut child = Command::new(program)
        .args(["--noflush", "-w", "5"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot start iptables-restore")?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(input.as_bytes()).context("cannot write to iptables-restore")?;
    }
    let out = child.wait_with_output().context("iptables-restore")?;
    if !out.status.success() {
        bail!("iptables-restore did not take\n{input}: {}", String::from_utf8_lossy(&out.stderr).trim());
    }
    Ok(())
}

/// The input for `iptables-restore --noflush`, or None when there is nothing to do.
fn plan(saved: &str, network: &str, host_port: bool) -> Option<String> {
    let rules: Vec<&str> = saved.lines().filter(|l| l.starts_with("-A ")).collect();
    let tag = format!("name: \\\"{network}\\\" id: ");
    let (ours, others): (Vec<&str>, Vec<&str>) = rules.iter().partition(|l| l.contains(&tag));
    // The chains that our rules lead to or stand in, but for the shared ones.
    let word_after = |line: &str, flag: &str| line.split(' ').skip_while(|w| *w != flag).nth(1).map(str::to_owned);
    let mut chains: BTreeSet<String> = ours
        .iter()
        .flat_map(|l| [word_after(l, "-A"), word_after(l, "-j")])
        .flatten()
        .filter(|c| (c.starts_with("CNI-") && !c.starts_with("CNI-HOSTPORT-")) && saved.contains(&format!("\n:{c} ")))
        .collect();
    let mut delete: Vec<String> = ours.iter().map(|l| l.replacen("-A ", "-D ", 1)).collect();
    let foreign = others.iter().any(|l| l.contains("-j CNI-DN-") || l.starts_with("-A CNI-HOSTPORT-DNAT "));
    if host_port && !foreign {
        let to_shared = |l: &&&str| HOST_PORT.iter().any(|c| word_after(l, "-j").as_deref() == Some(c));
        delete.extend(others.iter().filter(to_shared).map(|l| l.replacen("-A ", "-D ", 1)));
        chains.extend(HOST_PORT.iter().filter(|c| saved.contains(&format!("\n:{c} "))).map(ToString::to_string));
    }
    if delete.is_empty() && chains.is_empty() {
        return None;
    }
    let mut out = String::from("*nat\n");
    for rule in &delete {
        // Rules inside a chain that goes anyway fall with the flush.
        if !word_after(rule, "-D").is_some_and(|c| chains.contains(&c)) {
            out.push_str(rule);
            out.push('\n');
        }
    }
    for verb in ["-F", "-X"] {
        for chain in &chains {
            out.push_str(&format!("{verb} {chain}\n"));
        }
    }
    out.push_str("COMMIT\n");
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAVED: &str = r#"*nat
:PREROUTING ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:CNI-0a1b2c - [0:0]
:CNI-ffffff - [0:0]
:CNI-DN-123 - [0:0]
:CNI-HOSTPORT-DNAT - [0:0]
:CNI-HOSTPORT-MASQ - [0:0]
:CNI-HOSTPORT-SETMARK - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A POSTROUTING -m comment --comment "CNI portfwd requiring masquerade" -j CNI-HOSTPORT-MASQ
-A POSTROUTING -s 10.1.0.2/32 -m comment --comment "name: \"mine\" id: \"abc\"" -j CNI-0a1b2c
-A POSTROUTING -s 10.2.0.2/32 -m comment --comment "name: \"other\" id: \"def\"" -j CNI-ffffff
-A CNI-0a1b2c -d 10.1.0.0/16 -m comment --comment "name: \"mine\" id: \"abc\"" -j ACCEPT
-A CNI-ffffff -d 10.2.0.0/16 -m comment --comment "name: \"other\" id: \"def\"" -j ACCEPT
-A CNI-DN-123 -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.1.0.2:80
-A CNI-HOSTPORT-DNAT -p tcp -m comment --comment "dnat name: \"mine\" id: \"abc\"" -m multiport --dports 80 -j CNI-DN-123
-A CNI-HOSTPORT-SETMARK -m comment --comment "CNI portfwd masquerade mark" -j MARK --set-xmark 0x2000/0x2000
COMMIT
"#;

    #[test]
    fn takes_out_only_its_own_network() {
        let input = plan(SAVED, "mine", true).unwrap();
        for line in [
            "-D POSTROUTING -s 10.1.0.2/32 -m comment --comment \"name: \\\"mine\\\" id: \\\"abc\\\"\" -j CNI-0a1b2c",
            "-D PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT",
            "-X CNI-0a1b2c",
            "-X CNI-DN-123",
            "-X CNI-HOSTPORT-SETMARK",
        ] {
            assert!(input.lines().any(|l| l == line), "no {line} in\n{input}");
        }
        assert!(!input.contains("ffffff") && !input.contains("other"), "{input}");
    }

    #[test]
    fn keeps_the_shared_chains_for_others() {
        let input = plan(SAVED, "other", false).unwrap();
        assert!(input.contains("-X CNI-ffffff\n") && !input.contains("HOSTPORT"), "{input}");
        let input = plan(SAVED, "other", true).unwrap();
        assert!(!input.contains("HOSTPORT"), "another network still uses them: {input}");
    }

    #[test]
    fn nothing_to_do() {
        assert_eq!(plan("*nat\n:PREROUTING ACCEPT [0:0]\nCOMMIT\n", "mine", true), None);
    }
}
