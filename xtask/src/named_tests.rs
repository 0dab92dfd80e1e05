//! Documents that name tests as proof: every test named in them is in the tree, and runs.

use std::collections::BTreeSet;
use std::path::Path;

/// The documents.
const DOCUMENTS: [&str; 2] = ["docs/cases.md", "docs/security.md"];
/// Cases that docs/cases.md must have a line for.
const CASES: usize = 35;

/// What is wrong with the documents of the repository at `root`.
pub(crate) fn check(root: &Path) -> Vec<String> {
    let mut wrong = Vec::new();
    for document in DOCUMENTS {
        let read = |path: &str| std::fs::read_to_string(root.join(path)).ok();
        let Some(text) = read(document) else {
            wrong.push(format!("{document} is not there"));
            continue;
        };
        let named = named(&text);
        if named.is_empty() {
            wrong.push(format!("{document} names no test"));
        }
        wrong.extend(
            named.iter().filter_map(|(file, test)| missing(file, test, read)).map(|w| format!("{document}: {w}")),
        );
        if document == DOCUMENTS[0] {
            wrong.extend(
                without_test(&text).into_iter().map(|case| format!("{document}: no line with a test for {case}")),
            );
        }
    }
    wrong
}

/// `` `path/to/file.rs::name` `` in a document.
fn named(text: &str) -> BTreeSet<(&str, &str)> {
    let quoted = text.split('`').skip(1).step_by(2);
    quoted.filter_map(|q| q.split_once("::")).filter(|(file, _)| file.ends_with(".rs")).collect()
}

/// Cases without a line of the table that names a test.
fn without_test(text: &str) -> Vec<String> {
    let has = |case: &str| {
        let mut lines = text.lines().filter(|l| l.starts_with(&format!("| {case} ")));
        lines.any(|line| !named(line).is_empty())
    };
    (1..=CASES).map(|n| format!("A{n:02}")).filter(|case| !has(case)).collect()
}

/// Why a named test cannot be what is meant, if so.
fn missing(file: &str, test: &str, read: impl Fn(&str) -> Option<String>) -> Option<String> {
    let Some(text) = read(file) else { return Some(format!("{file} is not there")) };
    let lines: Vec<&str> = text.lines().collect();
    let head = format!("fn {test}(");
    let Some(at) = lines.iter().position(|l| l.contains(&head)) else {
        return Some(format!("{file} has no {test}"));
    };
    let attributes =
        lines[..at].iter().rev().map(|l| l.trim_start()).take_while(|l| l.starts_with("#[") || l.starts_with("//"));
    let attribute = |l: &str| l.starts_with("#[test]") || l.starts_with("#[tokio::test");
    if attributes.into_iter().any(attribute) {
        return None;
    }
    // Tests that share a cluster are listed by name in a harness of their own.
    let beside = Path::new(file).with_file_name("main.rs");
    let listed = |text: &str| {
        text.contains("harness(")
            && text.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|w| *w == test).count()
                > usize::from(text.contains(&head))
    };
    let in_harness = listed(&text) || beside.to_str().and_then(&read).is_some_and(|main| listed(&main));
    (!in_harness).then(|| format!("{file}: {test} is no test, and no harness lists it"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_named_must_be_a_test() {
        let files = |path: &str| {
            let text = match path {
                "a/t.rs" => {
                    "#[test]\n#[ignore = \"x\"]\nfn is() {}\n\nfn helper() {}\n/// Said.\npub(crate) fn listed(c: &C) {}\n#[tokio::test(start_paused = true)]\nasync fn waits() {}\n"
                }
                "a/main.rs" => "fn main() { harness(tests! { t: listed; }) }\n",
                _ => return None,
            };
            Some(text.to_owned())
        };
        for (file, test, fine) in [
            ("a/t.rs", "is", true),
            ("a/t.rs", "listed", true),
            ("a/t.rs", "waits", true),
            ("a/t.rs", "helper", false),
            ("a/t.rs", "gone", false),
            ("b/t.rs", "is", false),
        ] {
            assert_eq!(missing(file, test, files).is_none(), fine, "{file} {test}");
        }
    }

    #[test]
    fn names_and_cases_are_read() {
        let text = "| A01 x | `a/b.rs::one`, `c.rs::two` and `x::y` |\n| A02 x | none |\n";
        assert_eq!(named(text), BTreeSet::from([("a/b.rs", "one"), ("c.rs", "two")]));
        let left = without_test(text);
        assert_eq!((left.len(), left[0].as_str()), (34, "A02"));
    }

    #[test]
    fn every_test_that_documents_name_is_there() {
        assert_eq!(check(crate::root()), Vec::<String>::new());
    }
}
