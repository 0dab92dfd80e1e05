//! Files of variables that `fileKeyRef` reads (KEP-3721): lines `NAME='…'`, a strict part of shell syntax.
//!
//! The value stands between single quotes, is taken literally and may span lines; behind it only a comment may follow. Blank lines and
//! lines that begin with `#` are skipped. `NAME= …` assigns nothing.

/// The first value of `key` in the text of a file; empty when the file does not have it.
///
/// # Errors
/// Says what is wrong, in which line. Lines behind the key's are not looked at.
pub fn value_of(text: &str, key: &str) -> Result<String, String> {
    let wrong = |line: usize, what: &str| format!("invalid environment variable format at line {line}: {what}");
    let mut lines = text.lines().enumerate().map(|(i, l)| (i + 1, l));
    while let Some((number, line)) = lines.next() {
        let line = line.trim_start_matches([' ', '\t']);
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let Some((name, rest)) = line.split_once('=') else {
            return Err(wrong(number, "missing '='"));
        };
        let trimmed = name.trim_end_matches([' ', '\t']);
        if trimmed.is_empty() {
            return Err(wrong(number, "empty variable name"));
        }
        if trimmed != name {
            return Err(wrong(number, "whitespace before '=' is not allowed"));
        }
        if rest.starts_with([' ', '\t']) {
            if name == key {
                return Ok(String::new());
            }
            continue;
        }
        let Some(mut rest) = rest.strip_prefix('\'') else {
            return Err(wrong(number, "value must be enclosed in single quotes"));
        };
        let mut value = String::new();
        let mut at = number;
        loop {
            if let Some((end, behind)) = rest.split_once('\'') {
                value.push_str(end);
                let behind = behind.trim_start_matches([' ', '\t']);
                if !behind.is_empty() && !behind.starts_with('#') {
                    return Err(wrong(at, "unexpected content after closing quote"));
                }
                break;
            }
            value.push_str(rest);
            value.push('\n');
            let Some(next) = lines.next() else {
                return Err(format!(
                    "invalid environment variable format starting at line {number}: unclosed single quote"
                ));
            };
            (at, rest) = next;
        }
        if name == key {
            return Ok(value);
        }
    }
    Ok(String::new())
}

#[cfg(test)]
mod tests {
    use super::value_of;

    #[test]
    fn files() {
        let text = "# comment\n\n  A='1'\nB='two words' # why\nC='l1\nl2 $(A) \\n'\nD= 'x'\nE=''\nA='second'\n";
        for (key, want) in [("A", "1"), ("B", "two words"), ("C", "l1\nl2 $(A) \\n"), ("D", ""), ("E", ""), ("F", "")] {
            assert_eq!(value_of(text, key).as_deref(), Ok(want), "{key}");
        }
    }

    #[test]
    fn faults() {
        let at = |line, what: &str| format!("invalid environment variable format at line {line}: {what}");
        for (text, want) in [
            ("A", at(1, "missing '='")),
            ("\n='x'", at(2, "empty variable name")),
            ("A ='x'", at(1, "whitespace before '=' is not allowed")),
            ("A=x", at(1, "value must be enclosed in single quotes")),
            ("A=\"x\"", at(1, "value must be enclosed in single quotes")),
            ("B='x\ny' z", at(2, "unexpected content after closing quote")),
            ("#\nA='x\ny", "invalid environment variable format starting at line 2: unclosed single quote".to_string()),
        ] {
            assert_eq!(value_of(text, "A"), Err(want), "{text}");
        }
        // What stands behind the wanted key does not matter.
        assert_eq!(value_of("A='1'\nbroken", "A").as_deref(), Ok("1"));
    }
}
