//! `kubelet.crt` and `kubelet.key`: the serving certificate of a node that nobody signs for.
//!
//! Made once and kept, like Go's: a throw-away CA `HOST-ca@TIME` signs `HOST@TIME` for a year, valid from an hour ago; the file holds both.

use std::fs;
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyUsagePurpose};

use super::cert::Identity;
use super::key::{Template, distinguished_name, generate};
use super::store::write_private;
use crate::error::{ClusterError, ClusterResult, ErrorKind};

/// The pair's files in the certificate directory.
pub fn paths(dir: &Path) -> (PathBuf, PathBuf) {
    (dir.join("kubelet.crt"), dir.join("kubelet.key"))
}

/// The pair, made when one of the files is missing or they cannot be read.
///
/// # Errors
/// The host name does not fit into a certificate, or the disk refused.
pub fn ensure(dir: &Path, host: &str, now: Timestamp) -> ClusterResult<Identity> {
    let (crt, key) = paths(dir);
    let fail =
        |e: String| ClusterError::new(format!("make serving certificate {}", crt.display()), ErrorKind::Other, e);
    if let (Ok(c), Ok(k)) = (fs::read(&crt), fs::read(&key)) {
        match Identity::from_pem(&c, &k) {
            Ok(identity) => return Ok(identity),
            Err(error) => tracing::warn!(error, "{} cannot be used and is made anew", crt.display()),
        }
    }
    let (certificate, private) = make(host, now).map_err(|e| fail(e.to_string()))?;
    fs::create_dir_all(dir).map_err(|e| fail(e.to_string()))?;
    fs::write(&crt, &certificate).map_err(|e| fail(e.to_string()))?;
    write_private(&key, private.as_bytes()).map_err(|e| fail(e.to_string()))?;
    Identity::from_pem(certificate.as_bytes(), private.as_bytes()).map_err(fail)
}

fn make(host: &str, now: Timestamp) -> Result<(String, String), Box<dyn std::error::Error>> {
    let seconds = now.as_second();
    let params = |common_name: String, names: Vec<String>| -> Result<CertificateParams, Box<dyn std::error::Error>> {
        let mut params = CertificateParams::new(names)?;
        params.distinguished_name = distinguished_name(&Template { common_name, ..Template::default() });
        let from = rcgen::date_time_ymd(1970, 1, 1) + std::time::Duration::from_secs(u64::try_from(seconds - 3600)?);
        params.not_before = from;
        params.not_after = from + std::time::Duration::from_secs(365 * 86400);
        Ok(params)
    };
    let ca_key = generate()?;
    let mut ca = params(format!("{host}-ca@{seconds}"), Vec::new())?;
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    ca.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyCertSign];
    let ca_pem = ca.self_signed(&ca_key)?.pem();
    let key = generate()?;
    let mut leaf = params(format!("{host}@{seconds}"), vec![host.to_owned()])?;
    leaf.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    leaf.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let leaf = leaf.signed_by(&key, &Issuer::new(ca, ca_key))?;
    Ok((leaf.pem() + &ca_pem, key.serialize_pem()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn made_once_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let now: Timestamp = "2026-03-04T05:06:07Z".parse().unwrap();
        let first = ensure(dir.path(), "node-1", now).unwrap();
        assert_eq!(first.chain.len(), 2);
        assert_eq!(first.info.common_name, format!("node-1@{}", now.as_second()));
        assert_eq!(first.info.dns_names, ["node-1"]);
        assert_eq!(first.info.not_before.to_string(), "2026-03-04T04:06:07Z");
        assert_eq!(first.info.not_after.to_string(), "2027-03-04T04:06:07Z");
        assert_eq!(ensure(dir.path(), "node-1", Timestamp::now()).unwrap().chain, first.chain);
        fs::write(paths(dir.path()).1, "broken").unwrap();
        assert_ne!(ensure(dir.path(), "node-1", now).unwrap().chain, first.chain);
        assert_eq!(
            ensure(&dir.path().join("ip"), "10.0.0.9", now).unwrap().info.ip_addresses,
            ["10.0.0.9".parse::<std::net::IpAddr>().unwrap()]
        );
    }
}
