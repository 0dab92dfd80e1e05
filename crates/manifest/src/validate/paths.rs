//! File system paths within fields.

use super::field::{Errors, Path};

/// No `..` among its parts.
pub(crate) fn no_backsteps(e: &mut Errors, value: &str, path: &Path) {
    if has_backsteps(value) {
        e.invalid(path, value, "must not contain '..'");
    }
}

pub(crate) fn has_backsteps(value: &str) -> bool {
    value.split('/').any(|part| part == "..")
}

/// Relative, and no `..` among its parts.
pub(crate) fn descending(e: &mut Errors, value: &str, path: &Path) {
    if value.starts_with('/') {
        e.invalid(path, value, "must be a relative path");
    }
    no_backsteps(e, value, path);
}

/// As [`descending`]; names that start with `..` are reserved for the volume's own use.
pub(crate) fn not_reserved(e: &mut Errors, value: &str, path: &Path) {
    descending(e, value, path);
    if value.starts_with("..") && !value.starts_with("../") {
        e.invalid(path, value, "must not start with '..'");
    }
}

/// Permission bits of a file.
pub(crate) fn mode(e: &mut Errors, mode: Option<i32>, path: &Path) {
    if let Some(mode) = mode.filter(|m| !(0..=0o777).contains(m)) {
        e.invalid(path, mode, "must be a number between 0 and 0777 (octal), both inclusive");
    }
}
