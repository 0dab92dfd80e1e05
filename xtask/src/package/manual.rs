//! The manual page, from the program's own help texts.

use super::Help;

/// `rubelet.8`.
pub(super) fn page(help: &Help, version: &str, stamp: &str) -> String {
    let seconds = stamp.parse().unwrap_or(0);
    let date = jiff::Timestamp::from_second(seconds).map(|t| t.strftime("%Y-%m-%d").to_string()).unwrap_or_default();
    let mut text = format!(
        ".TH RUBELET 8 {date} \"rubelet {version}\" \"System Administration\"\n\
         .SH NAME\nrubelet, kubelet \\- node agent of Kubernetes\n\
         .SH SYNOPSIS\n.nf\nrubelet [flags]\nrubelet check [options] [flags]\nrubelet pods [options]\nrubelet explain pod NAME [options]\n\
         rubelet explain node [options]\nrubelet version\n.fi\n\
         .SH DESCRIPTION\n"
    );
    let (about, flags) = help.agent.split_once("\nUsage:").unwrap_or((&help.agent, ""));
    text += &escaped(about);
    text += "\nStarted under the name kubelet, the program is the agent only.\n";
    text += ".SH COMMANDS\n";
    for (name, of_command) in &help.commands {
        text += &format!(".SS rubelet {name}\n.nf\n{}\n.fi\n", escaped(of_command.trim_end()));
    }
    text += ".SH FLAGS OF THE AGENT\n.nf\n";
    text += &escaped(flags.split_once("Flags:\n").map_or(flags, |(_, flags)| flags).trim_end());
    text += "\n.fi\n\
        .SH FILES\n\
        .TP\n/var/lib/kubelet\nState: pods' volumes, checkpoints, certificates, the socket that commands ask (\\-\\-root\\-dir).\n\
        .TP\n/var/lib/kubelet/config.yaml\nConfiguration (KubeletConfiguration), where kubeadm puts it.\n\
        .TP\n/etc/kubernetes/kubelet.conf\nThe kubeconfig with which the node speaks to the API server.\n\
        .TP\n/etc/default/kubelet\nFlags of one's own (KUBELET_EXTRA_ARGS).\n\
        .SH EXIT STATUS\n0: ended as asked. 1: the agent could not start, or what was checked is not as it should be. 2: wrong usage.\n";
    text
}

/// Text as it stands, safe from roff.
fn escaped(text: &str) -> String {
    let line = |line: &str| {
        let line = line.replace('\\', "\\e").replace('-', "\\-");
        if line.starts_with(['.', '\'']) { format!("\\&{line}") } else { line }
    };
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_of_help_texts() {
        let help = Help {
            agent: "rubelet is an agent.\n\nUsage:\n  rubelet [flags]\n\nFlags:\n      --config string   a\\b\n".into(),
            commands: vec![("check".into(), "Is it fit?\n\n.dot\n".into())],
        };
        let page = page(&help, "1.2.3", "86400");
        assert!(page.starts_with(".TH RUBELET 8 1970-01-02 \"rubelet 1.2.3\""));
        assert!(page.contains("\n.SS rubelet check\n.nf\nIs it fit?\n\n\\&.dot\n.fi\n"), "{page}");
        assert!(page.contains("\\-\\-config string   a\\eb\n"), "{page}");
    }
}
