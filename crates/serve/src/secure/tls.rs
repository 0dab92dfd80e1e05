//! TLS of the kubelet's port: versions, cipher suites and curves as configured, the serving certificate from wherever it comes, and client
//! certificates that are asked for but not judged during the handshake: who cannot be trusted gets a 401, as Go's kubelet answers, not a closed
//! connection.

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use cluster::pki::{Identity, self_signed};
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ClientHello, NoServerSessionStorage, ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::{
    CipherSuite, DigitallySignedStruct, DistinguishedName, RootCertStore, ServerConfig, SignatureScheme, version,
};
use tokio::sync::watch;

use super::files::FromFiles;

/// Where the serving certificate comes from.
#[derive(Clone, Debug)]
pub enum ServingCertificate {
    /// `tlsCertFile` and `tlsPrivateKeyFile`; read again when they change.
    Files {
        /// Leaf first.
        certificate: PathBuf,
        /// PKCS#8, SEC1 or PKCS#1.
        key: PathBuf,
    },
    /// Signed on request (`serverTLSBootstrap`); while there is none, handshakes fail.
    Issued(watch::Receiver<Option<Arc<Identity>>>),
    /// `kubelet.crt` and `kubelet.key` in this directory (`--cert-dir`), made when they are missing.
    SelfSigned {
        /// `--cert-dir`.
        directory: PathBuf,
        /// The name in the certificate: the node's.
        host: String,
    },
}

/// How connections are secured.
#[derive(Clone, Debug)]
pub struct TlsSettings {
    /// The server's certificate.
    pub certificate: ServingCertificate,
    /// `tlsMinVersion`: `VersionTLS12` (also meant by empty and by older ones) or `VersionTLS13`.
    pub min_version: String,
    /// `tlsCipherSuites` in Go's names; empty: all. TLS 1.3 suites cannot be chosen.
    pub cipher_suites: Vec<String>,
    /// `tlsCurvePreferences`, IANA numbers; empty: all.
    pub curves: Vec<i32>,
}

/// Why there can be no TLS.
#[derive(Debug, thiserror::Error)]
#[error("set up TLS for the kubelet's port: {0}")]
pub struct TlsError(pub(crate) String);

/// The server's side of TLS; client certificates are asked for when `ask_clients`.
///
/// # Errors
/// The certificate cannot be used, or none of the wanted suites or curves is there.
pub(crate) fn server_config(settings: &TlsSettings, ask_clients: bool) -> Result<Arc<ServerConfig>, TlsError> {
    let mut provider = ring::default_provider();
    let tls13_only = settings.min_version == "VersionTLS13";
    if !settings.cipher_suites.is_empty() && !tls13_only {
        let wanted: Vec<u16> = settings.cipher_suites.iter().filter_map(|name| suite(name)).map(u16::from).collect();
        provider.cipher_suites.retain(|s| s.tls13().is_some() || wanted.contains(&u16::from(s.suite())));
    }
    if !settings.curves.is_empty() {
        let place = |group: u16| settings.curves.iter().position(|c| *c == i32::from(group));
        provider.kx_groups.retain(|g| place(u16::from(g.name())).is_some());
        provider.kx_groups.sort_by_key(|g| place(u16::from(g.name())));
        if provider.kx_groups.is_empty() {
            return Err(TlsError(format!(
                "none of tlsCurvePreferences {:?} is supported (23, 24 and 29 are)",
                settings.curves
            )));
        }
    }
    let tls12 = !tls13_only && provider.cipher_suites.iter().any(|s| s.tls13().is_none());
    let versions: &[_] = if tls12 { &[&version::TLS13, &version::TLS12] } else { &[&version::TLS13] };
    let provider = Arc::new(provider);
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(versions)
        .map_err(|e| TlsError(e.to_string()))?;
    let builder = match ask_clients {
        true => builder.with_client_cert_verifier(Arc::new(AskedFor(provider.clone()))),
        false => builder.with_no_client_auth(),
    };
    let resolver = Resolver::open(&settings.certificate, provider).map_err(TlsError)?;
    let mut config = builder.with_cert_resolver(Arc::new(resolver));
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    // Resumption would keep state of every client, and show certificates that were sent long ago.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

/// The suite of this name among those of TLS 1.2 that are served; Go's other ones are weak, or have no forward secrecy.
fn suite(name: &str) -> Option<CipherSuite> {
    Some(match name {
        "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256" => CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,
        "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384" => CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,
        "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305" | "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256" => {
            CipherSuite::TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256
        }
        "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256" => CipherSuite::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
        "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384" => CipherSuite::TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,
        "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305" | "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256" => {
            CipherSuite::TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256
        }
        _ => return None,
    })
}

/// Gives the serving certificate that is in force.
enum Resolver {
    Files(FromFiles<CertifiedKey>),
    Fixed(Arc<CertifiedKey>),
    Issued {
        newest: watch::Receiver<Option<Arc<Identity>>>,
        /// The newest identity, and what TLS makes of it.
        made: Mutex<Option<(Arc<Identity>, Arc<CertifiedKey>)>>,
        provider: Arc<CryptoProvider>,
    },
}

impl fmt::Debug for Resolver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Resolver")
    }
}

fn certified(identity: &Identity, provider: &CryptoProvider) -> Result<CertifiedKey, String> {
    CertifiedKey::from_der(identity.chain.clone(), identity.key.clone_key(), provider).map_err(|e| e.to_string())
}

impl Resolver {
    fn open(from: &ServingCertificate, provider: Arc<CryptoProvider>) -> Result<Self, String> {
        Ok(match from {
            ServingCertificate::Files { certificate, key } => {
                Self::Files(FromFiles::open(vec![certificate.clone(), key.clone()], move |files| {
                    certified(&Identity::from_pem(&files[0], &files[1])?, &provider)
                })?)
            }
            ServingCertificate::Issued(newest) => {
                Self::Issued { newest: newest.clone(), made: Mutex::default(), provider }
            }
            ServingCertificate::SelfSigned { directory, host } => {
                let identity =
                    self_signed::ensure(directory, host, jiff::Timestamp::now()).map_err(|e| e.to_string())?;
                Self::Fixed(Arc::new(certified(&identity, &provider)?))
            }
        })
    }
}

impl ResolvesServerCert for Resolver {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        match self {
            Self::Files(files) => Some(files.get()),
            Self::Fixed(key) => Some(key.clone()),
            Self::Issued { newest, made, provider } => {
                let Some(newest) = newest.borrow().clone() else {
                    tracing::debug!("No serving certificate available for the kubelet");
                    return None;
                };
                let mut made = made.lock().unwrap_or_else(PoisonError::into_inner);
                match &*made {
                    Some((of, key)) if Arc::ptr_eq(of, &newest) => Some(key.clone()),
                    _ => {
                        let key = certified(&newest, provider).map(Arc::new);
                        let key =
                            key.inspect_err(|e| tracing::error!(err = e, "Issued serving certificate cannot be used"));
                        let key = key.ok()?;
                        *made = Some((newest, key.clone()));
                        Some(key)
                    }
                }
            }
        }
    }
}

/// Has clients prove that they hold the key of whatever certificate they show; [`ClientCa`] judges the certificate.
#[derive(Debug)]
struct AskedFor(Arc<CryptoProvider>);

impl ClientCertVerifier for AskedFor {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        // The CA file may change while the server runs; without hints every client sends what it has.
        &[]
    }

    fn verify_client_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, cert, dss, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, cert, dss, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// The CAs of client certificates (`authentication.x509.clientCAFile`); read again when the file changes.
pub(crate) struct ClientCa(FromFiles<Arc<dyn ClientCertVerifier>>);

impl ClientCa {
    /// # Errors
    /// There is no certificate in the file, or it cannot be read.
    pub(crate) fn open(path: PathBuf) -> Result<Self, TlsError> {
        let make = |files: &[Vec<u8>]| {
            let mut roots = RootCertStore::empty();
            roots.add_parsable_certificates(cluster::pki::cert::certificates(&files[0])?);
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::new(ring::default_provider()))
                .build()
                .map_err(|e| e.to_string())
        };
        FromFiles::open(vec![path], make).map(Self).map_err(|e| TlsError(format!("clientCAFile: {e}")))
    }

    /// Judges a certificate, now: it may have expired, or the CA gone, since the connection was made.
    pub(crate) fn verify(&self, chain: &[CertificateDer<'_>]) -> Result<(), String> {
        let (leaf, above) = chain.split_first().ok_or("no certificate")?;
        self.0.get().verify_client_cert(leaf, above, UnixTime::now()).map(drop).map_err(|e| e.to_string())
    }
}
