//! Text forms that must equal Go's byte for byte: quoted strings (`%q`) and HTML-safe JSON.

use serde_json::Value;

/// Go's `strconv.Quote`.
pub fn quote(s: &str) -> String {
    let mut out = String::with_capacity(s.len() + 2);
    out.push('"');
    for c in s.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\x07' => out.push_str("\\a"),
            '\x08' => out.push_str("\\b"),
            '\x0c' => out.push_str("\\f"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\x0b' => out.push_str("\\v"),
            c if printable(c) => out.push(c),
            c if (c as u32) < 0x20 || c as u32 == 0x7f => out.push_str(&format!("\\x{:02x}", c as u32)),
            c if (c as u32) < 0x1_0000 => out.push_str(&format!("\\u{:04x}", c as u32)),
            c => out.push_str(&format!("\\U{:08x}", c as u32)),
        }
    }
    out.push('"');
    out
}

/// Letters, marks, numbers, punctuation, symbols and the ASCII space. `escape_debug` has the same table, but escapes a mark at the
/// start of a string, so the character is looked at behind another one; it also escapes the single quote.
fn printable(c: char) -> bool {
    if c == '\'' {
        return true;
    }
    let behind: String = ['a', c].into_iter().collect();
    behind.escape_debug().count() == 2
}

/// JSON as Go's `json.Marshal` writes it: `<`, `>`, `&` and the two Unicode line ends escaped.
pub fn json(value: &Value) -> String {
    // These characters occur inside strings only, so that replacing them in the whole text is safe.
    value
        .to_string()
        .replace('<', "\\u003c")
        .replace('>', "\\u003e")
        .replace('&', "\\u0026")
        .replace('\u{2028}', "\\u2028")
        .replace('\u{2029}', "\\u2029")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_as_go_does() {
        for (input, expected) in [
            ("a b's", r#""a b's""#),
            ("q\"\\", r#""q\"\\""#),
            ("l1\nl2\t\r", r#""l1\nl2\t\r""#),
            ("\x07\x08\x0b\x0c\x01\x7f", r#""\a\b\v\f\x01\x7f""#),
            ("é中😀", r#""é中😀""#),
            ("\u{301}x", "\"\u{301}x\""),
            ("\u{a0}\u{200b}\u{feff}", r#""\u00a0\u200b\ufeff""#),
            ("\u{85}\u{e000}\u{10ffff}", r#""\u0085\ue000\U0010ffff""#),
        ] {
            assert_eq!(quote(input), expected);
        }
    }

    #[test]
    fn json_is_html_safe() {
        assert_eq!(json(&serde_json::json!({"a": "<&>\u{2028}"})), r#"{"a":"\u003c\u0026\u003e\u2028"}"#);
    }
}
