//! Private keys (ECDSA P-256) and the requests they sign.

use base64::Engine;
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, PKCS_ECDSA_P256_SHA256, PublicKeyData};
use sha2::{Digest, Sha512_256};

use crate::error::{ClusterError, ClusterResult, ErrorKind};

/// Who a certificate is for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Template {
    /// Subject CN.
    pub common_name: String,
    /// Subject O.
    pub organizations: Vec<String>,
    /// Alternative names: DNS names and IP addresses.
    pub names: Vec<String>,
}

impl Template {
    /// A node's: `system:node:NAME` in `system:nodes`.
    pub fn node(name: &str) -> Self {
        Self {
            common_name: format!("system:node:{name}"),
            organizations: vec!["system:nodes".to_owned()],
            names: Vec::new(),
        }
    }
}

fn bad(action: &str, error: impl std::fmt::Display) -> ClusterError {
    ClusterError::new(action, ErrorKind::Other, error.to_string())
}

/// A new key.
///
/// # Errors
/// The system has no randomness.
pub fn generate() -> ClusterResult<KeyPair> {
    KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(|e| bad("make a private key", e))
}

/// A key in a PKCS#8 PEM text. Keys in other forms (SEC1, as Go writes them) cannot sign requests here: None.
pub fn from_pem(pem: &str) -> Option<KeyPair> {
    KeyPair::from_pem(pem).ok()
}

/// A certificate signing request, PEM.
///
/// # Errors
/// A name that a certificate cannot hold.
pub fn signing_request(key: &KeyPair, template: &Template) -> ClusterResult<String> {
    let action = "make a certificate signing request";
    let mut params = CertificateParams::new(template.names.clone()).map_err(|e| bad(action, e))?;
    params.distinguished_name = distinguished_name(template);
    params.serialize_request(key).and_then(|r| r.pem()).map_err(|e| bad(action, e))
}

pub(crate) fn distinguished_name(template: &Template) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    for organization in &template.organizations {
        name.push(DnType::OrganizationName, organization.as_str());
    }
    name.push(DnType::CommonName, template.common_name.as_str());
    name
}

/// The name of a bootstrap request: the same key asking for the same thing finds its earlier request again after a restart.
/// (`node-csr-` and a SHA-512/256 over key, subject and usages.)
pub fn digested_name(key: &KeyPair, template: &Template, usages: &[&str]) -> String {
    let encode = |bytes: &[u8]| base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(bytes);
    let mut hash = Sha512_256::new();
    let spki = key.subject_public_key_info();
    let parts = std::iter::once(spki.as_slice())
        .chain(std::iter::once(template.common_name.as_bytes()))
        .chain(template.organizations.iter().map(String::as_bytes))
        .chain(usages.iter().map(|u| u.as_bytes()));
    for part in parts {
        hash.update(encode(part));
        hash.update(b"|");
    }
    format!("node-csr-{}", encode(&hash.finalize()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The name is what Go's crypto library gives for this key by the same rule: a Go kubelet and this one find the same request.
    #[test]
    fn the_name_is_stable_and_depends_on_all_parts() {
        let key = from_pem(include_str!("testdata/bootstrap-key.pem")).unwrap();
        let name = digested_name(&key, &Template::node("n1"), &["digital signature", "client auth"]);
        assert_eq!(name, "node-csr-FZY4zedX-nQoK2awCfEeMXzaPCpXllCeumV4qZv5Hag");
        let t = Template::node("n1");
        assert_ne!(name, digested_name(&key, &Template::node("n2"), &["digital signature", "client auth"]));
        assert_ne!(name, digested_name(&key, &t, &["client auth"]));
        assert_ne!(name, digested_name(&generate().unwrap(), &t, &["digital signature", "client auth"]));
    }

    #[test]
    fn a_request_says_who_and_where() {
        use x509_parser::prelude::FromDer;
        let key = generate().unwrap();
        let template =
            Template { names: vec!["10.0.0.7".into(), "n1".into(), "fd00::7".into()], ..Template::node("n1") };
        let pem = signing_request(&key, &template).unwrap();
        let (_, block) = x509_parser::pem::parse_x509_pem(pem.as_bytes()).unwrap();
        assert_eq!(block.label, "CERTIFICATE REQUEST");
        let (_, csr) = x509_parser::certification_request::X509CertificationRequest::from_der(&block.contents).unwrap();
        assert_eq!(csr.certification_request_info.subject.to_string(), "O=system:nodes, CN=system:node:n1");
        let names = format!("{:?}", csr.requested_extensions().unwrap().collect::<Vec<_>>());
        assert!(names.contains("DNSName(\"n1\")") && names.contains("IPAddress([10, 0, 0, 7])"), "{names}");
    }
}
