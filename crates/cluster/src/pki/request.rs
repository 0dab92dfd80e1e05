//! A certificate by CertificateSigningRequest: asked for, waited for.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{CertificateSigningRequest, CertificateSigningRequestSpec};
use tokio_util::sync::CancellationToken;

use crate::Unit;
use crate::calls::CertificateApi;
use crate::error::{ClusterError, ClusterResult, ErrorKind};
use crate::reflect::{Collection, Delta, Reflector, Scope};

/// Requests that can be made and watched.
pub trait Requests: CertificateApi + Collection<CertificateSigningRequest> {}

impl<T: CertificateApi + Collection<CertificateSigningRequest>> Requests for T {}

/// Asks for a certificate; gives the request's name and uid. With a `name` an earlier request of that name is taken up again.
///
/// # Errors
/// Any kind.
pub async fn create(
    api: &dyn Requests,
    csr_pem: &str,
    name: Option<&str>,
    signer: &str,
    usages: &[&str],
) -> ClusterResult<(String, String)> {
    let mut request = CertificateSigningRequest {
        spec: CertificateSigningRequestSpec {
            request: ByteString(csr_pem.as_bytes().to_vec()),
            signer_name: signer.to_owned(),
            usages: Some(usages.iter().map(|u| (*u).to_owned()).collect()),
            ..CertificateSigningRequestSpec::default()
        },
        ..CertificateSigningRequest::default()
    };
    match name {
        Some(name) => request.metadata.name = Some(name.to_owned()),
        None => request.metadata.generate_name = Some("csr-".to_owned()),
    }
    let made = match (api.create_csr(&request).await, name) {
        (Err(error), Some(name)) if error.is_already_exists() => {
            let there = api.get_csr(name).await?;
            if there.spec.signer_name != signer {
                return Err(ClusterError::new(
                    format!("take up certificate signing request {name}"),
                    ErrorKind::Conflict,
                    format!("it is for signer {:?}, not {signer:?}", there.spec.signer_name),
                ));
            }
            there
        }
        (made, _) => made?,
    };
    Ok((made.metadata.name.unwrap_or_default(), made.metadata.uid.unwrap_or_default()))
}

/// Waits until a request is signed; gives the certificate, PEM.
///
/// # Errors
/// Forbidden: denied; Server: failed; NotFound: deleted or replaced; Timeout.
pub async fn wait(
    api: Arc<dyn Requests>,
    name: &str,
    uid: &str,
    timeout: Duration,
    unit: Unit,
) -> ClusterResult<Vec<u8>> {
    let fail =
        |kind, text: String| ClusterError::new(format!("wait for certificate signing request {name}"), kind, text);
    let stop = CancellationToken::new();
    let _stop = stop.clone().drop_guard();
    let (reflector, mut deltas, status) = Reflector::new(Arc::new(Watched(api)), Scope::named(None, name), 4, unit);
    tokio::spawn(reflector.run(stop));
    let answer = async {
        while let Some(delta) = deltas.recv().await {
            let seen = match delta {
                Delta::Snapshot(items) => items.into_iter().next(),
                Delta::Upsert(item) => Some(item),
                Delta::Remove(_) => None,
            };
            let Some(seen) = seen else {
                return Err(fail(ErrorKind::NotFound, "it was deleted before it was signed".to_owned()));
            };
            if seen.metadata.uid.as_deref() != Some(uid) {
                return Err(fail(ErrorKind::NotFound, format!("csr {name:?} changed UIDs")));
            }
            let status = seen.status.unwrap_or_default();
            let condition = |kind: &str| status.conditions.iter().flatten().find(|c| c.type_ == kind);
            for (kind, error, word) in
                [("Denied", ErrorKind::Forbidden, "is denied"), ("Failed", ErrorKind::Server, "failed")]
            {
                if let Some(c) = condition(kind) {
                    let (reason, message) = (c.reason.as_deref().unwrap_or(""), c.message.as_deref().unwrap_or(""));
                    let text = format!("certificate signing request {word}, reason: {reason:?}, message: {message:?}");
                    return Err(fail(error, text));
                }
            }
            if condition("Approved").is_some()
                && let Some(certificate) = status.certificate.filter(|c| !c.0.is_empty())
            {
                return Ok(certificate.0);
            }
        }
        Err(fail(ErrorKind::Other, "the watch was stopped".to_owned()))
    };
    match tokio::time::timeout(timeout, answer).await {
        Ok(answer) => answer,
        Err(_) => {
            let why = status.borrow().error.as_ref().map(|e| format!(": {e}")).unwrap_or_default();
            Err(fail(ErrorKind::Timeout, format!("not signed within {timeout:?}{why}"))
                .advise("is there a controller that approves it? else: kubectl certificate approve"))
        }
    }
}

/// The requests as a plain collection.
struct Watched(Arc<dyn Requests>);

#[async_trait::async_trait]
impl Collection<CertificateSigningRequest> for Watched {
    async fn list(
        &self,
        scope: &Scope,
        ask: &crate::reflect::ListAsk,
    ) -> ClusterResult<crate::reflect::Page<CertificateSigningRequest>> {
        self.0.list(scope, ask).await
    }

    async fn watch(
        &self,
        scope: &Scope,
        ask: &crate::reflect::WatchAsk,
    ) -> ClusterResult<crate::reflect::WatchStream<CertificateSigningRequest>> {
        self.0.watch(scope, ask).await
    }

    async fn get(
        &self,
        namespace: Option<&str>,
        name: &str,
        from_cache: bool,
    ) -> ClusterResult<CertificateSigningRequest> {
        self.0.get(namespace, name, from_cache).await
    }
}
