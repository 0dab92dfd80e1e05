//! Certificates on disk as Go keeps them: `PREFIX-DATE.pem` with certificate and key, and the symlink `PREFIX-current.pem`.
//!
//! A crash between the steps leaves either the old link or `PREFIX-updated.pem`, which is taken up at the next start.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use jiff::tz::TimeZone;

use super::cert::{Identity, certificates, to_pem};
use crate::error::{ClusterError, ClusterResult, ErrorKind};

/// One pair's place in the certificate directory.
#[derive(Clone, Debug)]
pub struct FileStore {
    dir: PathBuf,
    prefix: &'static str,
}

impl FileStore {
    /// The client certificate's: `kubelet-client`.
    pub fn client(dir: &Path) -> Self {
        Self { dir: dir.to_owned(), prefix: "kubelet-client" }
    }

    /// The serving certificate's: `kubelet-server`.
    pub fn server(dir: &Path) -> Self {
        Self { dir: dir.to_owned(), prefix: "kubelet-server" }
    }

    fn path(&self, part: &str) -> PathBuf {
        self.dir.join(format!("{}-{part}.pem", self.prefix))
    }

    /// `PREFIX-current.pem`.
    pub fn current_path(&self) -> PathBuf {
        self.path("current")
    }

    fn fail(&self, path: &Path, error: impl std::fmt::Display) -> ClusterError {
        ClusterError::new(format!("keep certificate {}", path.display()), ErrorKind::Other, error.to_string())
    }

    /// The pair in use; None when there is none yet. Also looks for `PREFIX.crt` and `PREFIX.key`, as Go does.
    ///
    /// # Errors
    /// There is one that cannot be read.
    pub fn current(&self) -> ClusterResult<Option<Identity>> {
        let (current, updated) = (self.current_path(), self.path("updated"));
        if !current.exists() && updated.is_symlink() {
            fs::rename(&updated, &current).map_err(|e| self.fail(&current, e))?;
        }
        let (crt, key) = (self.dir.join(format!("{}.crt", self.prefix)), self.dir.join(format!("{}.key", self.prefix)));
        let (certificate, key) = if current.exists() {
            (current.clone(), current)
        } else if crt.exists() && key.exists() {
            (crt, key)
        } else {
            return Ok(None);
        };
        let read = |path: &Path| fs::read(path).map_err(|e| self.fail(path, e));
        Identity::from_pem(&read(&certificate)?, &read(&key)?).map(Some).map_err(|e| self.fail(&certificate, e))
    }

    /// Writes a new pair and makes it the current one.
    ///
    /// # Errors
    /// They do not belong together, or the disk refused; the old pair stays current.
    pub fn update(&self, certificate: &[u8], key_pem: &str, now: Timestamp) -> ClusterResult<Identity> {
        let date = now.to_zoned(TimeZone::system()).strftime("%Y-%m-%d-%H-%M-%S").to_string();
        let path = self.path(&date);
        let identity = Identity::from_pem(certificate, key_pem.as_bytes()).map_err(|e| self.fail(&path, e))?;
        let mut text: String = certificates(certificate)
            .map_err(|e| self.fail(&path, e))?
            .iter()
            .map(|der| to_pem("CERTIFICATE", der))
            .collect();
        text.push_str(key_pem);
        fs::create_dir_all(&self.dir).map_err(|e| self.fail(&self.dir, e))?;
        write_private(&path, text.as_bytes()).map_err(|e| self.fail(&path, e))?;
        self.link(&path).map_err(|e| self.fail(&self.current_path(), e))?;
        Ok(identity)
    }

    fn link(&self, target: &Path) -> io::Result<()> {
        let (current, updated) = (self.current_path(), self.path("updated"));
        if fs::symlink_metadata(&current).is_ok_and(|m| !m.is_symlink()) {
            return Err(io::Error::other("expected a symlink but it is a file"));
        }
        match fs::remove_file(&updated) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        symlink(std::path::absolute(target)?, &updated)?;
        // Atomic: there is a current pair at every moment.
        fs::rename(&updated, &current)?;
        fs::File::open(&self.dir)?.sync_all()
    }
}

/// Writes a file that only root may read, synced.
pub(crate) fn write_private(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(content)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn pair(cn: &str) -> (String, String) {
        let key = super::super::key::generate().unwrap();
        let mut params = rcgen::CertificateParams::default();
        params.distinguished_name.push(rcgen::DnType::CommonName, cn);
        (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
    }

    #[test]
    fn dated_files_behind_one_link() {
        let dir = tempfile::tempdir().unwrap();
        let store = FileStore::client(&dir.path().join("pki"));
        assert!(store.current().unwrap().is_none());
        let (cert, key) = pair("a");
        let now: Timestamp = "2026-03-04T05:06:07Z".parse().unwrap();
        store.update(cert.as_bytes(), &key, now).unwrap();
        assert_eq!(store.current().unwrap().unwrap().info.common_name, "a");
        let target = fs::read_link(store.current_path()).unwrap();
        assert!(target.is_absolute());
        let name = target.file_name().unwrap().to_str().unwrap().to_owned();
        assert!(name.starts_with("kubelet-client-2026-03-0") && name.ends_with("-06-07.pem"), "{name}");
        assert_eq!(fs::metadata(&target).unwrap().permissions().mode() & 0o777, 0o600);
        let (cert, key) = pair("b");
        store.update(cert.as_bytes(), &key, now + jiff::SignedDuration::from_secs(1)).unwrap();
        assert_eq!(store.current().unwrap().unwrap().info.common_name, "b");
        assert!(target.exists(), "the old one stays");
        // A crash after the new link was made and the old one was gone.
        fs::rename(store.current_path(), store.path("updated")).unwrap();
        assert_eq!(store.current().unwrap().unwrap().info.common_name, "b");
    }

    #[test]
    fn a_pair_that_does_not_fit_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let store = FileStore::server(dir.path());
        let ((cert, _), (_, key)) = (pair("a"), pair("b"));
        assert!(store.update(cert.as_bytes(), &key, Timestamp::now()).is_err());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_pair_of_go_is_taken_up() {
        // Written by Go: SEC1 key ("EC PRIVATE KEY") after the certificate.
        let pem = include_bytes!("testdata/go-pair.pem");
        let dir = tempfile::tempdir().unwrap();
        let dated = dir.path().join("kubelet-client-2026-01-01-00-00-00.pem");
        fs::write(&dated, pem).unwrap();
        symlink(&dated, dir.path().join("kubelet-client-current.pem")).unwrap();
        let identity = FileStore::client(dir.path()).current().unwrap().unwrap();
        assert_eq!(identity.info.common_name, "system:node:n1");
        assert_eq!(identity.info.organizations, ["system:nodes"]);
    }
}
