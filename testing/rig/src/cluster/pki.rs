//! Keys and certificates, made on the spot.

use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

/// How long a certificate is good for; it begins an hour ago, for clocks that differ.
const LIFE: Duration = Duration::from_secs(365 * 24 * 3600);

/// A certificate and its key as files.
#[derive(Clone, Debug)]
pub struct Pair {
    /// PEM of the certificate.
    pub certificate: PathBuf,
    /// PEM of the key, readable by the owner only.
    pub key: PathBuf,
}

/// An authority that signs certificates; its own files lie beside theirs.
#[derive(Debug)]
pub struct Authority {
    dir: PathBuf,
    issuer: Issuer<'static, KeyPair>,
    /// Its certificate and key.
    pub own: Pair,
}

impl Authority {
    /// A new one, whose files are `DIR/NAME.crt` and `DIR/NAME.key`.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn new(dir: &Path, name: &str) -> Result<Self> {
        let key = KeyPair::generate().context("cannot make a key")?;
        let mut params = params(name, None, &[])?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages =
            vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign, KeyUsagePurpose::DigitalSignature];
        let certificate = params.self_signed(&key).context("cannot sign the authority's certificate")?;
        let own = write(dir, name, &certificate.pem(), &key)?;
        Ok(Self { dir: dir.to_owned(), issuer: Issuer::new(params, key), own })
    }

    /// A certificate for this user (CN) and group (O), for client and server alike, in `DIR/FILE.crt`; `names` are the host names and
    /// addresses that a server has.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn issue(&self, file: &str, user: &str, group: Option<&str>, names: &[&str]) -> Result<Pair> {
        self.sign(file, user, params(user, group, names)?)
    }

    /// As [`Authority::issue`] for a client, valid from and to these seconds from now, which may lie in the past.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn issue_within(&self, file: &str, user: &str, group: Option<&str>, from: i64, to: i64) -> Result<Pair> {
        let mut params = params(user, group, &[])?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let at =
            |offset: i64| rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(now.saturating_add_signed(offset));
        (params.not_before, params.not_after) = (at(from), at(to));
        self.sign(file, user, params)
    }

    fn sign(&self, file: &str, user: &str, mut params: CertificateParams) -> Result<Pair> {
        let key = KeyPair::generate().context("cannot make a key")?;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        let certificate = params.signed_by(&key, &self.issuer).with_context(|| format!("cannot sign for {user}"))?;
        write(&self.dir, file, &certificate.pem(), &key)
    }
}

/// A key alone, `DIR/NAME.key`, and its public half, `DIR/NAME.pub`: for the tokens of service accounts.
///
/// # Errors
/// When a file cannot be written.
pub(crate) fn key(dir: &Path, name: &str) -> Result<()> {
    let key = KeyPair::generate().context("cannot make a key")?;
    fs::write(dir.join(format!("{name}.pub")), key.public_key_pem())?;
    secret(&dir.join(format!("{name}.key")), &key.serialize_pem())
}

fn params(user: &str, group: Option<&str>, names: &[&str]) -> Result<CertificateParams> {
    let names: Vec<String> = names.iter().map(ToString::to_string).collect();
    let mut params = CertificateParams::new(names).context("not a host name")?;
    params.distinguished_name = DistinguishedName::new();
    if let Some(group) = group {
        params.distinguished_name.push(DnType::OrganizationName, group);
    }
    params.distinguished_name.push(DnType::CommonName, user);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let epoch = rcgen::date_time_ymd(1970, 1, 1);
    params.not_before = epoch + now.saturating_sub(Duration::from_secs(3600));
    params.not_after = epoch + (now + LIFE);
    Ok(params)
}

fn write(dir: &Path, name: &str, certificate: &str, key: &KeyPair) -> Result<Pair> {
    let pair = Pair { certificate: dir.join(format!("{name}.crt")), key: dir.join(format!("{name}.key")) };
    fs::write(&pair.certificate, certificate)
        .with_context(|| format!("cannot write {}", pair.certificate.display()))?;
    secret(&pair.key, &key.serialize_pem())?;
    Ok(pair)
}

/// Writes a file that only its owner may read.
///
/// # Errors
/// When it cannot be written.
pub(crate) fn secret(file: &Path, text: &str) -> Result<()> {
    let open = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(file);
    open.and_then(|mut f| f.write_all(text.as_bytes())).with_context(|| format!("cannot write {}", file.display()))
}
