//! `$(NAME)` references in commands, arguments, variables and `subPathExpr`.
//!
//! `$(NAME)` becomes the variable's value, or stays as it is when nobody knows the name; `$$` becomes `$` and so hides a reference;
//! everything else is kept byte for byte. Values that are put in are not looked at again.

/// `text` with its references replaced by what `lookup` gives.
pub fn expand(text: &str, mut lookup: impl FnMut(&str) -> Option<String>) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        if let Some(after) = rest.strip_prefix('$') {
            out.push('$');
            rest = after;
        } else if let Some((name, after)) = rest.strip_prefix('(').and_then(|r| r.split_once(')')) {
            match lookup(name) {
                Some(value) => out.push_str(&value),
                None => out.extend(["$(", name, ")"]),
            }
            rest = after;
        } else {
            out.push('$');
        }
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn known(name: &str) -> Option<String> {
        match name {
            "A" => Some("1".into()),
            "B" => Some("$(A)".into()),
            "E" => Some(String::new()),
            "a.b-c" => Some("odd".into()),
            "é" => Some("acute".into()),
            _ => None,
        }
    }

    #[test]
    fn table() {
        for (input, expected) in [
            ("", ""),
            ("plain", "plain"),
            ("$é", "$é"),
            ("$中", "$中"),
            ("$😀", "$😀"),
            ("a$", "a$"),
            ("$", "$"),
            ("$$", "$"),
            ("$$$", "$$"),
            ("$$$$", "$$"),
            ("$(A)", "1"),
            ("$$(A)", "$(A)"),
            ("$$$(A)", "$1"),
            ("$(MISSING)", "$(MISSING)"),
            ("$(A", "$(A"),
            ("$(", "$("),
            ("$()", "$()"),
            ("$(A)$(B)", "1$(A)"),
            ("$(E)x", "x"),
            ("$A", "$A"),
            ("$(a.b-c)", "odd"),
            ("$(é)$(A)é", "acute1é"),
            ("$($(A))", "$($(A))"),
            ("$(A$(A)", "$(A$(A)"),
            ("$ (A)", "$ (A)"),
            (")$(A)(", ")1("),
        ] {
            assert_eq!(expand(input, known), expected, "{input}");
        }
    }

    proptest! {
        /// Text without the operator is untouched, and so is all text when nothing is known and nothing is escaped.
        #[test]
        fn keeps_what_it_does_not_know(text in "[^$]{0,20}(\\$[^$]{1,6}){0,4}") {
            prop_assert_eq!(expand(&text, |_| None), text);
        }

        /// A doubled operator gives the text back, whatever is in it.
        #[test]
        fn escaping_round_trips(text in "\\PC{0,40}") {
            let escaped = text.replace('$', "$$");
            prop_assert_eq!(expand(&escaped, |_| Some("value".into())), text);
        }

        /// Any input gives valid text, and a reference between known text is replaced exactly once.
        #[test]
        fn replaces_between(left in "[^$]{0,9}", right in "[^$]{0,9}", value in "\\PC{0,9}") {
            let text = format!("{left}$(NAME){right}");
            let got = expand(&text, |n| (n == "NAME").then(|| value.clone()));
            prop_assert_eq!(got, format!("{left}{value}{right}"));
        }
    }
}
