//! What a certificate says about itself, and PEM in and out.

use jiff::Timestamp;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

/// The parts of a certificate that decisions hang on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertInfo {
    /// Subject CN; empty without one.
    pub common_name: String,
    /// Subject O.
    pub organizations: Vec<String>,
    /// Start of its life.
    pub not_before: Timestamp,
    /// End of its life.
    pub not_after: Timestamp,
    /// DNS names.
    pub dns_names: Vec<String>,
    /// IP addresses.
    pub ip_addresses: Vec<std::net::IpAddr>,
}

impl CertInfo {
    /// Reads a DER certificate.
    ///
    /// # Errors
    /// It is not an X.509 certificate; the text says why.
    pub fn of(der: &[u8]) -> Result<Self, String> {
        let (_, cert) = X509Certificate::from_der(der).map_err(|e| format!("not a certificate: {e}"))?;
        let time = |t: x509_parser::time::ASN1Time| {
            Timestamp::from_second(t.timestamp()).map_err(|e| format!("certificate time: {e}"))
        };
        let mut info = Self {
            common_name: cert
                .subject()
                .iter_common_name()
                .next()
                .and_then(|a| a.as_str().ok())
                .unwrap_or("")
                .to_owned(),
            organizations: cert
                .subject()
                .iter_organization()
                .filter_map(|a| a.as_str().ok())
                .map(str::to_owned)
                .collect(),
            not_before: time(cert.validity().not_before)?,
            not_after: time(cert.validity().not_after)?,
            dns_names: Vec::new(),
            ip_addresses: Vec::new(),
        };
        if let Ok(Some(names)) = cert.subject_alternative_name() {
            for name in &names.value.general_names {
                match name {
                    GeneralName::DNSName(name) => info.dns_names.push((*name).to_owned()),
                    GeneralName::IPAddress(bytes) => {
                        if let Ok(four) = <[u8; 4]>::try_from(*bytes) {
                            info.ip_addresses.push(four.into());
                        } else if let Ok(sixteen) = <[u8; 16]>::try_from(*bytes) {
                            info.ip_addresses.push(sixteen.into());
                        }
                    }
                    _ => {}
                }
            }
        }
        Ok(info)
    }
}

/// The certificates of a PEM text; other blocks are passed over.
///
/// # Errors
/// Bad PEM, or no certificate in it.
pub fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let certs: Vec<_> =
        CertificateDer::pem_slice_iter(pem).collect::<Result<_, _>>().map_err(|e| format!("bad PEM: {e}"))?;
    if certs.is_empty() { Err("no CERTIFICATE block in it".to_owned()) } else { Ok(certs) }
}

/// The private key of a PEM text (PKCS#8, SEC1 or PKCS#1).
///
/// # Errors
/// Bad PEM, or no key in it.
pub fn private_key(pem: &[u8]) -> Result<PrivateKeyDer<'static>, String> {
    PrivateKeyDer::from_pem_slice(pem).map_err(|e| format!("no private key: {e}"))
}

/// A certificate chain with its key, as a peer shows it.
#[derive(Debug)]
pub struct Identity {
    /// Leaf first.
    pub chain: Vec<CertificateDer<'static>>,
    /// The leaf's key.
    pub key: PrivateKeyDer<'static>,
    /// What the leaf says.
    pub info: CertInfo,
}

impl Identity {
    /// Reads certificate and key, which may be in one text, and checks that they belong together.
    ///
    /// # Errors
    /// What is missing or does not fit.
    pub fn from_pem(certificate: &[u8], key: &[u8]) -> Result<Self, String> {
        let chain = certificates(certificate)?;
        let key = private_key(key)?;
        let leaf = chain.first().ok_or("no certificate")?;
        let info = CertInfo::of(leaf)?;
        // Signing keys that do not belong to the certificate are what a half-written rotation looks like.
        let signing =
            rustls::crypto::ring::sign::any_supported_type(&key).map_err(|e| format!("unusable private key: {e}"))?;
        rustls::sign::CertifiedKey::new(chain.clone(), signing)
            .keys_match()
            .map_err(|e| format!("private key does not belong to the certificate: {e}"))?;
        Ok(Self { chain, key, info })
    }
}

impl PartialEq for Identity {
    fn eq(&self, other: &Self) -> bool {
        self.chain == other.chain && self.key.secret_der() == other.key.secret_der()
    }
}

/// A PEM block.
pub fn to_pem(label: &str, der: &[u8]) -> String {
    use base64::Engine;
    let body = base64::engine::general_purpose::STANDARD.encode(der);
    let mut text = format!("-----BEGIN {label}-----\n");
    let mut rest = body.as_str();
    while !rest.is_empty() {
        let (line, more) = rest.split_at(rest.len().min(64));
        text.push_str(line);
        text.push('\n');
        rest = more;
    }
    text.push_str(&format!("-----END {label}-----\n"));
    text
}
