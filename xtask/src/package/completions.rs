//! Completion scripts of shells, from the program's own help texts.

use super::Help;

/// Path below the root, and text.
pub(super) fn all(help: &Help) -> Vec<(&'static str, String)> {
    let agent = flags(&help.agent);
    let commands: Vec<(&str, Vec<String>)> =
        help.commands.iter().map(|(name, text)| (name.as_str(), flags(text))).collect();
    vec![
        ("usr/share/bash-completion/completions/rubelet", bash(&agent, &commands)),
        ("usr/share/zsh/vendor-completions/_rubelet", zsh(&agent, &commands)),
        ("usr/share/fish/vendor_completions.d/rubelet.fish", fish(&agent, &commands)),
    ]
}

/// The long flags that a help text lists.
fn flags(help: &str) -> Vec<String> {
    let lines = help.lines().map(str::trim_start).filter(|l| l.starts_with('-'));
    let flag = |line: &str| {
        let word = line.split([' ', ',']).find(|w| w.starts_with("--"))?;
        let end = word.find(|c: char| !c.is_ascii_alphanumeric() && c != '-').unwrap_or(word.len());
        Some(word[..end].to_owned())
    };
    let mut all: Vec<String> = lines.filter_map(flag).collect();
    all.sort();
    all.dedup();
    all
}

/// First words of the commands, each once.
fn verbs<'a>(commands: &[(&'a str, Vec<String>)]) -> Vec<&'a str> {
    let mut all: Vec<&str> = commands.iter().filter_map(|(name, _)| name.split(' ').next()).collect();
    all.dedup();
    all
}

/// Second words of the commands that begin with this one.
fn nouns<'a>(commands: &[(&'a str, Vec<String>)], verb: &str) -> Vec<&'a str> {
    commands.iter().filter_map(|(name, _)| name.strip_prefix(verb)?.strip_prefix(' ')).collect()
}

fn bash(agent: &[String], commands: &[(&str, Vec<String>)]) -> String {
    let mut cases = String::new();
    for (name, flags) in commands {
        cases += &format!("    \"{name}\"*) words=\"{}\" ;;\n", flags.join(" "));
    }
    let nouns: String = verbs(commands)
        .into_iter()
        .map(|verb| (verb, nouns(commands, verb)))
        .filter(|(_, nouns)| !nouns.is_empty())
        .map(|(verb, nouns)| format!("    {verb}) words=\"{}\" ;;\n", nouns.join(" ")))
        .collect();
    format!(
        "# bash completion for rubelet\n\
         _rubelet() {{\n  \
           local cur=${{COMP_WORDS[COMP_CWORD]}} words given=\"${{COMP_WORDS[*]:1:COMP_CWORD-1}}\"\n  \
           case $given in\n    \
             '') words=\"{} {}\" ;;\n\
         {nouns}{cases}    \
             *) words=\"{}\" ;;\n  \
           esac\n  \
           case ${{COMP_WORDS[COMP_CWORD-1]}} in --*dir | --*file | --config | --*kubeconfig) COMPREPLY=($(compgen -f -- \"$cur\")); return ;; esac\n  \
           COMPREPLY=($(compgen -W \"$words\" -- \"$cur\"))\n\
         }}\n\
         complete -F _rubelet rubelet\n",
        verbs(commands).join(" "),
        agent.join(" "),
        agent.join(" "),
    )
}

fn zsh(agent: &[String], commands: &[(&str, Vec<String>)]) -> String {
    let mut cases = String::new();
    for verb in verbs(commands) {
        let of_verb = commands.iter().filter(|(name, _)| name.split(' ').next() == Some(verb));
        let mut words: Vec<&str> = nouns(commands, verb);
        words.extend(of_verb.flat_map(|(_, flags)| flags.iter().map(String::as_str)));
        cases += &format!("    {verb}) compadd -- {} ;;\n", words.join(" "));
    }
    format!(
        "#compdef rubelet\n\
         if (( CURRENT == 2 )); then\n  \
           compadd -- {} {}\n\
         else\n  \
           case $words[2] in\n{cases}    \
             *) compadd -- {} ;;\n  \
           esac\n\
         fi\n",
        verbs(commands).join(" "),
        agent.join(" "),
        agent.join(" "),
    )
}

fn fish(agent: &[String], commands: &[(&str, Vec<String>)]) -> String {
    let verbs = verbs(commands);
    let mut text = String::from("# fish completion for rubelet\n");
    let first = "__fish_use_subcommand";
    text += &format!("complete -c rubelet -n {first} -f -a \"{}\"\n", verbs.join(" "));
    for flag in agent {
        text += &format!("complete -c rubelet -n {first} -l {}\n", flag.trim_start_matches('-'));
    }
    for verb in verbs {
        let nouns = nouns(commands, verb);
        if !nouns.is_empty() {
            text += &format!(
                "complete -c rubelet -n \"__fish_seen_subcommand_from {verb}\" -f -a \"{}\"\n",
                nouns.join(" ")
            );
        }
    }
    for (name, flags) in commands {
        let last = name.rsplit(' ').next().unwrap_or(name);
        for flag in flags {
            let long = flag.trim_start_matches('-');
            text += &format!("complete -c rubelet -n \"__fish_seen_subcommand_from {last}\" -l {long}\n");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_found_in_help_texts() {
        let clap = "Options:\n  -n, --namespace <NAMESPACE>\n          Its\n      --json\n  -h, --help\n          [default: --none]\n";
        assert_eq!(flags(clap), ["--help", "--json", "--namespace"]);
        let agent =
            "Flags:\n      --address ip      sets address\n  -v, --v Level   verbosity\n      --map k=v[,...]\n";
        assert_eq!(flags(agent), ["--address", "--map", "--v"]);
    }

    #[test]
    fn bash_completes() {
        let commands =
            [("check", vec!["--json"]), ("explain pod", vec!["--namespace"]), ("explain node", vec!["--json"])];
        let commands = commands.map(|(name, flags)| (name, flags.into_iter().map(str::to_owned).collect()));
        let script = bash(&["--config".to_owned(), "--v".to_owned()], &commands);
        let complete = |words: &[&str]| {
            let line = words.join(" ");
            let ask = format!(
                "{script}\nCOMP_WORDS=({line} ''); COMP_CWORD={}; _rubelet; echo \"${{COMPREPLY[*]}}\"",
                words.len()
            );
            let output = std::process::Command::new("bash").args(["-c", &ask]).output().unwrap();
            assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8(output.stdout).unwrap().trim().to_owned()
        };
        assert_eq!(complete(&["rubelet"]), "check explain --config --v");
        assert_eq!(complete(&["rubelet", "explain"]), "pod node");
        assert_eq!(complete(&["rubelet", "explain", "pod"]), "--namespace");
        assert_eq!(complete(&["rubelet", "check"]), "--json");
        assert_eq!(complete(&["rubelet", "--v"]), "--config --v");
    }
}
