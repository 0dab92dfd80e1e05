//! Every flag with its value, given or not, in the words of Go's flag types (`/flagz`).

use serde_json::Value;

use super::Flags;
use super::table::{FLAGS, Kind, Target};
use crate::field::Field as _;
use crate::types::KubeletConfiguration;

impl Flags {
    /// Every flag by name, with what was given or else its default. What the configuration file says is not in it.
    #[must_use]
    pub fn all(&self) -> Vec<(String, String)> {
        let defaults = KubeletConfiguration::without_file().write();
        let value = |spec: &super::Spec| {
            if let Some(given) = self.set.get(spec.name) {
                return words(spec.kind, given);
            }
            match spec.target {
                Target::Own("") => words(spec.kind, &Value::Null),
                Target::Own(text) => text.to_owned(),
                Target::Field(path) => {
                    let value = path.split('.').try_fold(&defaults, |v, key| v.get(key));
                    words(spec.kind, value.unwrap_or(&Value::Null))
                }
            }
        };
        FLAGS.iter().map(|spec| (spec.name.to_owned(), value(spec))).collect()
    }
}

/// A scalar, or nothing.
fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

fn words(kind: Kind, value: &Value) -> String {
    let list = || value.as_array().into_iter().flatten();
    let pairs = |separator: &str| {
        let mut pairs: Vec<String> = Vec::new();
        for (key, value) in value.as_object().into_iter().flatten() {
            match value {
                Value::Array(values) => pairs.extend(values.iter().map(|v| format!("{key}{separator}{}", plain(v)))),
                one => pairs.push(format!("{key}{separator}{}", plain(one))),
            }
        }
        pairs.sort();
        pairs.join(",")
    };
    let joined = |items: Vec<String>| items.join(",");
    match kind {
        Kind::Bool | Kind::GoBool | Kind::Version if value.is_null() => "false".to_owned(),
        Kind::Int32 | Kind::Int64 | Kind::GoInt | Kind::Level if value.is_null() => "0".to_owned(),
        Kind::Duration | Kind::GoDuration if value.is_null() => "0s".to_owned(),
        Kind::List => format!("[{}]", joined(list().map(plain).collect())),
        Kind::Map | Kind::PairMap | Kind::Labels | Kind::BoolMap => pairs("="),
        Kind::LessMap => pairs("<"),
        Kind::Multimap => pairs(":"),
        Kind::Taints => joined(
            list()
                .map(|t| {
                    let value = plain(&t["value"]);
                    let value = if value.is_empty() { value } else { format!("={value}") };
                    format!("{}{value}:{}", plain(&t["key"]), plain(&t["effect"]))
                })
                .collect(),
        ),
        Kind::ReservedMemory => list()
            .map(|node| {
                let limits = node["limits"].as_object().into_iter().flatten();
                let limits: Vec<String> = limits.map(|(k, v)| format!("{k}={}", plain(v))).collect();
                format!("{}:{}", plain(&node["numaNode"]), limits.join(","))
            })
            .collect::<Vec<_>>()
            .join(";"),
        Kind::Vmodule => {
            joined(list().map(|m| format!("{}={}", plain(&m["filePattern"]), plain(&m["verbosity"]))).collect())
        }
        _ => plain(value),
    }
}

#[cfg(test)]
mod tests {
    use crate::parse_flags;

    /// What the Go kubelet 1.36.1 shows for the same command line.
    #[test]
    fn as_the_go_kubelet() {
        let mut lines = include_str!("../../tests/fixtures/flagz.txt").lines();
        let command = lines.next().unwrap().strip_prefix("# kubelet ").unwrap().split_once(';').unwrap().0;
        let flags = parse_flags(&command.split(' ').map(str::to_owned).collect::<Vec<_>>()).unwrap();
        let all: Vec<String> = flags.all().into_iter().map(|(name, value)| format!("{name}={value}")).collect();
        assert_eq!(all, lines.collect::<Vec<_>>());
    }

    #[test]
    fn given_lists_and_maps() {
        let given = [
            "--node-labels=b=2,a=1",
            "--register-with-taints=k=v:NoSchedule,x:NoExecute",
            "--eviction-hard=memory.available<50Mi",
            "--enforce-node-allocatable=pods,kube-reserved",
            "--manifest-url-header=a:b,a:c",
            "--reserved-memory=0:memory=1Gi",
            "--feature-gates=NodeLogQuery=true",
            "--vmodule=a=3",
        ];
        let flags = parse_flags(&given.map(str::to_owned)).unwrap();
        let all = flags.all();
        for (name, value) in [
            ("node-labels", "a=1,b=2"),
            ("register-with-taints", "k=v:NoSchedule,x:NoExecute"),
            ("eviction-hard", "memory.available<50Mi"),
            ("enforce-node-allocatable", "[pods,kube-reserved]"),
            ("manifest-url-header", "a:b,a:c"),
            ("reserved-memory", "0:memory=1Gi"),
            ("feature-gates", "NodeLogQuery=true"),
            ("vmodule", "a=3"),
        ] {
            let found = all.iter().find(|(n, _)| n == name).unwrap();
            assert_eq!(found.1, value, "{name}");
        }
    }
}
