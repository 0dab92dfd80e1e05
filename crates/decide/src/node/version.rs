//! The runtime's version as the node's status shows it.

/// `NAME://VERSION`. A semantic version loses its `v`; of another one only the numbers stay (`1.6.20~ds1` is `1.6.20`); what is no version
/// at all stays as it is.
pub fn runtime_version(name: &str, version: &str) -> String {
    format!("{name}://{}", normal(version).unwrap_or_else(|| version.to_owned()))
}

fn normal(version: &str) -> Option<String> {
    let text = version.trim_start();
    let text = text.strip_prefix('v').unwrap_or(text);
    let numbers = text.find(|c: char| !c.is_ascii_digit() && c != '.').map_or(text, |end| &text[..end]);
    let numbers = numbers.trim_end_matches('.');
    let parts: Vec<&str> = numbers.split('.').take_while(|p| !p.is_empty()).collect();
    let numbers = parts.join(".");
    let rest = text.get(numbers.len()..)?.trim();
    let padded = |part: &str| part.len() > 1 && part.starts_with('0');
    if parts.len() == 3 && !parts.iter().any(|p| padded(p)) && is_suffix(rest) {
        return Some(numbers + rest);
    }
    (parts.len() >= 2 && !padded(parts[0])).then_some(numbers)
}

/// What may follow the numbers of a semantic version: `-PRERELEASE`, `+BUILD`, both or nothing.
fn is_suffix(rest: &str) -> bool {
    let dotted =
        |text: &str| text.split('.').all(|p| !p.is_empty() && p.chars().all(|c| c.is_ascii_alphanumeric() || c == '-'));
    let (before, build) = rest.split_once('+').map_or((rest, None), |(b, m)| (b, Some(m)));
    let release = before.is_empty() || before.strip_prefix('-').is_some_and(dotted);
    release && build.is_none_or(dotted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_as_go_shows_them() {
        for (given, shown) in [
            // Seen from the Go kubelet on containerd of Debian 12 and on 2.2.9.
            ("1.6.20~ds1", "1.6.20"),
            ("v2.2.9", "2.2.9"),
            ("1.34.0-rc.1+git.5", "1.34.0-rc.1+git.5"),
            ("1.34", "1.34"),
            ("v1.2.3.4-x", "1.2.3.4"),
            ("1.2.03", "1.2.03"),
            ("1.2.3-", "1.2.3"),
            ("unknown", "unknown"),
            ("", ""),
            ("7", "7"),
        ] {
            assert_eq!(runtime_version("x", given), format!("x://{shown}"), "{given}");
        }
    }
}
