//! TLS towards the API server, and what its failures mean.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};

use crate::credentials::Snapshot;
use crate::error::{ClusterError, ClusterResult, ErrorKind};
use crate::kubeconfig::ClusterConfig;
use crate::pki::cert;

/// The client side of TLS for these credentials; offers HTTP/2, then HTTP/1.1.
///
/// # Errors
/// Tls: the CA bundle holds nothing usable, or the key cannot sign.
pub fn client_config(config: &ClusterConfig, now: &Snapshot) -> ClusterResult<Arc<ClientConfig>> {
    let fail = |message: String| {
        ClusterError::new(format!("set up TLS for {}", config.path.display()), ErrorKind::Tls, message)
    };
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|e| fail(e.to_string()))?;
    let builder = if config.insecure_skip_tls_verify {
        builder.dangerous().with_custom_certificate_verifier(AnyServer::new(provider))
    } else {
        let mut roots = RootCertStore::empty();
        match &now.ca {
            Some(pem) => {
                let (added, _) = roots.add_parsable_certificates(cert::certificates(pem).map_err(fail)?);
                if added == 0 {
                    return Err(fail("the CA bundle holds no usable certificate".to_owned()));
                }
            }
            None => {
                roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            }
        }
        builder.with_root_certificates(roots)
    };
    let mut tls = match &now.identity {
        Some(identity) => builder
            .with_client_auth_cert(identity.chain.clone(), identity.key.clone_key())
            .map_err(|e| fail(format!("client certificate: {e}")))?,
        None => builder.with_no_client_auth(),
    };
    tls.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(tls))
}

/// What a TLS failure means for an operator: the message and the advice.
pub(crate) fn explain(error: &rustls::Error) -> (String, &'static str) {
    let advice = match error {
        rustls::Error::InvalidCertificate(e) => match e {
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                "the API server's certificate has expired, or this host's clock is ahead"
            }
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                "this host's clock is behind, or the API server's certificate is not valid yet"
            }
            CertificateError::UnknownIssuer | CertificateError::BadSignature => {
                "the CA in the kubeconfig did not sign the API server's certificate: put the cluster's CA there"
            }
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
                "the API server's certificate does not name this address: use a name from it, or set tls-server-name"
            }
            _ => "check the API server's certificate and the CA in the kubeconfig",
        },
        rustls::Error::AlertReceived(_) => "the API server refused the client certificate or the protocol",
        rustls::Error::InvalidMessage(_) => "what answers there does not speak TLS: check the server URL",
        _ => "",
    };
    (format!("TLS: {error}"), advice)
}

/// Takes any certificate (`insecure-skip-tls-verify`, probes and hooks over HTTPS); signatures are still checked.
#[derive(Debug)]
pub struct AnyServer(Arc<CryptoProvider>);

impl AnyServer {
    /// A verifier that checks signatures as `provider` does.
    pub fn new(provider: Arc<CryptoProvider>) -> Arc<Self> {
        Arc::new(Self(provider))
    }
}

impl ServerCertVerifier for AnyServer {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
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
