//! hostPath volumes: the `type` field's check, and what it lets the kubelet make.

use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, OpenOptionsExt};
use std::path::{Component, Path};

/// Why a hostPath volume is refused, as the Go kubelet puts it into the FailedMount event.
#[derive(Debug, thiserror::Error)]
pub enum HostPathError {
    /// The path contains `..`.
    #[error("invalid HostPath `{0}`: must not contain '..'")]
    Backsteps(String),
    /// Something else, or nothing, is at the path.
    #[error("hostPath type check failed: {path} is not {wanted}")]
    WrongType {
        /// The volume's path.
        path: String,
        /// What the type asks for.
        wanted: &'static str,
    },
    /// The type is none that the API knows.
    #[error("{0} is an invalid volume type")]
    UnknownType(String),
    /// It was to be made, and could not be.
    #[error("{what}")]
    Make {
        /// What was attempted.
        what: String,
        /// The system's answer.
        source: io::Error,
    },
}

/// Checks a hostPath volume's path (as this process sees it) against its type, and makes what `DirectoryOrCreate` (0755) and
/// `FileOrCreate` (0644) find missing; the umask applies, parents of a file are not made. Symbolic links are followed. Blocks.
///
/// # Errors
/// The path is refused, or cannot be made.
pub fn hostpath_check(path: &Path, kind: &str) -> Result<(), HostPathError> {
    let text = || path.display().to_string();
    if path.components().any(|c| matches!(c, Component::ParentDir)) {
        return Err(HostPathError::Backsteps(text()));
    }
    if kind.is_empty() {
        return Ok(());
    }
    let file_type = std::fs::metadata(path).ok().map(|m| m.file_type());
    let make = |what: &str, made: io::Result<()>| match made {
        Ok(()) => Ok(()),
        Err(source) => Err(HostPathError::Make { what: format!("{what} {}", text()), source }),
    };
    let (wanted, good) = match kind {
        "DirectoryOrCreate" if file_type.is_none() => {
            return make("mkdir", std::fs::DirBuilder::new().recursive(true).mode(0o755).create(path));
        }
        "FileOrCreate" if file_type.is_none() => {
            let open = std::fs::OpenOptions::new().create(true).append(true).mode(0o644).open(path);
            return make("open", open.map(drop));
        }
        "Directory" | "DirectoryOrCreate" => ("a directory", file_type.is_some_and(|t| t.is_dir())),
        "File" | "FileOrCreate" => ("a file", file_type.is_some_and(|t| t.is_file())),
        "Socket" => ("a socket file", file_type.is_some_and(|t| t.is_socket())),
        "CharDevice" => ("a character device", file_type.is_some_and(|t| t.is_char_device())),
        "BlockDevice" => ("a block device", file_type.is_some_and(|t| t.is_block_device())),
        other => return Err(HostPathError::UnknownType(other.to_owned())),
    };
    match good {
        true => Ok(()),
        false => Err(HostPathError::WrongType { path: text(), wanted }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::put;

    #[test]
    fn every_type() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        put(d, "file", "");
        let _socket = std::os::unix::net::UnixListener::bind(d.join("socket")).unwrap();
        std::os::unix::fs::symlink("file", d.join("link")).unwrap();
        let (dir, file, socket, link) = (d.to_owned(), d.join("file"), d.join("socket"), d.join("link"));
        let (null, missing) = (Path::new("/dev/null").to_owned(), d.join("missing"));
        for (kind, good, bad, words) in [
            ("Directory", vec![&dir], vec![&file, &missing, &null], "a directory"),
            ("DirectoryOrCreate", vec![&dir], vec![&file, &socket], "a directory"),
            ("File", vec![&file, &link], vec![&dir, &missing, &socket], "a file"),
            ("FileOrCreate", vec![&file, &link], vec![&dir, &socket], "a file"),
            ("Socket", vec![&socket], vec![&file, &missing, &dir], "a socket file"),
            ("CharDevice", vec![&null], vec![&file, &missing], "a character device"),
            ("BlockDevice", vec![], vec![&null, &missing, &file], "a block device"),
        ] {
            for path in good {
                hostpath_check(path, kind).unwrap_or_else(|e| panic!("{kind} {path:?}: {e}"));
            }
            for path in bad {
                let text = hostpath_check(path, kind).unwrap_err().to_string();
                assert_eq!(text, format!("hostPath type check failed: {} is not {words}", path.display()));
            }
        }
        hostpath_check(&missing, "").unwrap();
        assert!(!missing.exists(), "nothing is made for the empty type");
        assert_eq!(hostpath_check(&file, "Pipe").unwrap_err().to_string(), "Pipe is an invalid volume type");
        assert_eq!(
            hostpath_check(Path::new("/a/../b"), "").unwrap_err().to_string(),
            "invalid HostPath `/a/../b`: must not contain '..'"
        );
    }

    #[test]
    fn what_is_missing_is_made() {
        let dir = tempfile::tempdir().unwrap();
        hostpath_check(&dir.path().join("a/b"), "DirectoryOrCreate").unwrap();
        assert!(dir.path().join("a/b").is_dir());
        hostpath_check(&dir.path().join("f"), "FileOrCreate").unwrap();
        assert!(dir.path().join("f").is_file());
        let error = hostpath_check(&dir.path().join("no/f"), "FileOrCreate").unwrap_err();
        assert!(matches!(error, HostPathError::Make { .. }));
        std::fs::write(dir.path().join("f"), "kept").unwrap();
        hostpath_check(&dir.path().join("f"), "FileOrCreate").unwrap();
        assert_eq!(crate::testing::get(dir.path().join("f")), "kept");
    }
}
