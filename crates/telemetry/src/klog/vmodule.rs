//! `--vmodule`: verbosity by source file.

/// One `pattern=level` of `--vmodule`. The pattern is matched against the file's name without directory and `.rs`; it may
/// hold `*`, `?`, `[a-z]`, `[^a-z]` and `\` to quote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VModule {
    pattern: String,
    level: i32,
}

/// A `--vmodule` value that cannot be used; worded as klog words it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VModuleError {
    /// Not `name=N,name=N`.
    #[error("syntax error: expect comma-separated list of filename=N")]
    Syntax,
    /// A level below 0.
    #[error("negative value for vmodule level")]
    Negative,
}

impl VModule {
    /// One pattern, as `logging.vmodule[].{filePattern,verbosity}` gives it.
    pub fn new(pattern: &str, level: i32) -> Self {
        Self { pattern: pattern.to_owned(), level }
    }

    /// Reads a flag's value, `worker=4,pleg*=6`. Empty items and level 0 are passed over.
    ///
    /// # Errors
    /// An item without name, without number, or with a negative one.
    pub fn parse_list(text: &str) -> Result<Vec<Self>, VModuleError> {
        let mut patterns = Vec::new();
        for item in text.split(',').filter(|item| !item.is_empty()) {
            let (pattern, level) = item.split_once('=').ok_or(VModuleError::Syntax)?;
            if pattern.is_empty() {
                return Err(VModuleError::Syntax);
            }
            let level: i32 = level.parse().map_err(|_| VModuleError::Syntax)?;
            match level {
                ..0 => return Err(VModuleError::Negative),
                0 => {}
                _ => patterns.push(Self::new(pattern, level)),
            }
        }
        Ok(patterns)
    }

    /// The level for a source file, when the pattern matches it.
    pub(super) fn level_for(&self, file: &str) -> Option<i32> {
        let name = file.rsplit('/').next().unwrap_or(file);
        let name = name.strip_suffix(".rs").unwrap_or(name);
        matches(self.pattern.as_bytes(), name.as_bytes()).then_some(self.level)
    }
}

/// Shell pattern without `/` rules: names hold none. A malformed pattern matches nothing.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    let Some((&first, rest)) = pattern.split_first() else {
        return name.is_empty();
    };
    if first == b'*' {
        return (0..=name.len()).any(|skip| matches(rest, &name[skip..]));
    }
    let Some((&byte, name_rest)) = name.split_first() else {
        return false;
    };
    match first {
        b'?' => matches(rest, name_rest),
        b'[' => match class(rest, byte) {
            Some((true, rest)) => matches(rest, name_rest),
            _ => false,
        },
        b'\\' => match rest.split_first() {
            Some((&quoted, rest)) => quoted == byte && matches(rest, name_rest),
            None => false,
        },
        literal => literal == byte && matches(rest, name_rest),
    }
}

/// Whether `byte` is in the class that begins `pattern` (behind its `[`), and what follows the class.
fn class(pattern: &[u8], byte: u8) -> Option<(bool, &[u8])> {
    let (negated, mut rest) = match pattern {
        [b'^', rest @ ..] => (true, rest),
        _ => (false, pattern),
    };
    let mut found = false;
    let mut empty = true;
    loop {
        rest = match rest {
            [b']', rest @ ..] if !empty => return Some((found != negated, rest)),
            [low, b'-', high, rest @ ..] if *high != b']' => {
                found |= (*low..=*high).contains(&byte);
                rest
            }
            [one, rest @ ..] => {
                found |= *one == byte;
                rest
            }
            [] => return None,
        };
        empty = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        for (pattern, file, hit) in [
            ("worker", "crates/pod/src/worker.rs", true),
            ("worker", "crates/pod/src/worker_tests.rs", false),
            ("work*", "worker.rs", true),
            ("*er", "a/worker.rs", true),
            ("w?rker", "worker.rs", true),
            ("w?rker", "wrker.rs", false),
            ("[a-w]orker", "worker.rs", true),
            ("[^a-v]orker", "worker.rs", true),
            ("[^a-w]orker", "worker.rs", false),
            ("[worker", "worker.rs", false),
            ("\\worker", "worker.rs", true),
            ("*", "x.rs", true),
            ("", "x.rs", false),
        ] {
            assert_eq!(VModule::new(pattern, 3).level_for(file).is_some(), hit, "{pattern} {file}");
        }
    }

    #[test]
    fn lists() {
        let list = VModule::parse_list("recordio=2,file=1,gfs*=3,,zero=0,").unwrap();
        assert_eq!(list, [VModule::new("recordio", 2), VModule::new("file", 1), VModule::new("gfs*", 3)]);
        for bad in ["a", "=1", "a=", "a=b", "a=1=2", "a=99999999999"] {
            assert_eq!(VModule::parse_list(bad), Err(VModuleError::Syntax), "{bad}");
        }
        assert_eq!(VModule::parse_list("a=-1"), Err(VModuleError::Negative));
    }
}
