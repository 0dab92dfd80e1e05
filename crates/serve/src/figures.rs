//! The pages of figures that are collected when somebody asks: the summary and the metrics of pods, containers and probes. The same on
//! both ports.
//!
//! | path | |
//! |---|---|
//! | `/stats/summary` | GET, POST; `only_cpu_and_memory=true`; JSON |
//! | `/metrics/cadvisor`, `/metrics/resource`, `/metrics/probes` | any method; text format 0.0.4 |

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use http::header::{ALLOW, HeaderValue};
use http::{HeaderMap, Method, StatusCode, Uri};
use telemetry::metrics::Metrics;

use crate::read_only::accepts_json;
use crate::reply::{Answer, JSON, Reply, error, reply, service_error};

/// Where the figures come from. Answers wait for collections, which the source shares among those who ask.
#[async_trait]
pub trait Figures: Send + Sync {
    /// The summary as JSON.
    ///
    /// # Errors
    /// Why it cannot be had.
    async fn summary(&self, only_cpu_and_memory: bool) -> Result<Bytes, String>;

    /// `/metrics/cadvisor`.
    ///
    /// # Errors
    /// Why it cannot be had.
    async fn cadvisor(&self) -> Result<Bytes, String>;

    /// `/metrics/resource`.
    async fn resource(&self) -> Bytes;

    /// What of `/metrics` is collected when it is asked for, to be added at its end; empty when it cannot be had.
    async fn on_main_page(&self) -> String;
}

/// Answers a request for figures; None: it is for something else.
pub(crate) fn answer(
    figures: &Arc<dyn Figures>,
    metrics: &Arc<Metrics>,
    method: &Method,
    uri: &Uri,
    headers: &HeaderMap,
) -> Option<Answer> {
    let (figures, metrics) = (figures.clone(), metrics.clone());
    Some(match uri.path() {
        "/stats/summary" if !matches!(*method, Method::GET | Method::POST) => {
            let mut reply = service_error(StatusCode::METHOD_NOT_ALLOWED, "405: Method Not Allowed");
            reply.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, POST"));
            Answer::Now(reply)
        }
        "/stats/summary" if !accepts_json(headers) => Answer::Now(service_error(
            StatusCode::NOT_ACCEPTABLE,
            "406: Not Acceptable\n\nAvailable representations: application/json",
        )),
        "/stats/summary" => {
            let only = only_cpu_and_memory(uri.query());
            Answer::Wait(Box::pin(async move {
                match figures.summary(only).await {
                    Ok(summary) => reply(StatusCode::OK, JSON, summary),
                    Err(why) => service_error(StatusCode::INTERNAL_SERVER_ERROR, format!("Internal Error: {why}")),
                }
            }))
        }
        "/metrics/cadvisor" => Answer::Wait(Box::pin(async move {
            match figures.cadvisor().await {
                Ok(text) => page(text),
                Err(why) => error(StatusCode::INTERNAL_SERVER_ERROR, &why),
            }
        })),
        "/metrics/resource" => Answer::Wait(Box::pin(async move { page(figures.resource().await) })),
        "/metrics/probes" => Answer::Later(Box::new(move || match metrics.encode_probes() {
            Ok(text) => page(text),
            Err(cause) => error(StatusCode::INTERNAL_SERVER_ERROR, &cause.to_string()),
        })),
        "/metrics" => Answer::Wait(Box::pin(async move {
            let more = figures.on_main_page().await;
            match metrics.encode() {
                Ok(text) => page(text + &more),
                Err(cause) => error(StatusCode::INTERNAL_SERVER_ERROR, &cause.to_string()),
            }
        })),
        _ => return None,
    })
}

fn page(text: impl Into<Bytes>) -> Reply {
    reply(StatusCode::OK, Metrics::CONTENT_TYPE, text)
}

/// The parameter counts when it is there once, as in Go.
fn only_cpu_and_memory(query: Option<&str>) -> bool {
    let all = crate::secure::parameters(query);
    let mut values = all.iter().filter(|(key, _)| key == "only_cpu_and_memory").map(|(_, value)| value.as_str());
    values.next() == Some("true") && values.next().is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fixed;

    #[async_trait]
    impl Figures for Fixed {
        async fn summary(&self, only_cpu_and_memory: bool) -> Result<Bytes, String> {
            Ok(Bytes::from(format!("{{\"only\": {only_cpu_and_memory}}}")))
        }

        async fn cadvisor(&self) -> Result<Bytes, String> {
            Err("no groups".to_owned())
        }

        async fn resource(&self) -> Bytes {
            Bytes::from_static(b"resource_scrape_error 0\n")
        }

        async fn on_main_page(&self) -> String {
            "more 1\n".to_owned()
        }
    }

    async fn ask(method: Method, uri: &str, accept: Option<&str>) -> Option<(u16, String)> {
        let figures: Arc<dyn Figures> = Arc::new(Fixed);
        let metrics = Arc::new(Metrics::new().unwrap());
        let headers = accept.map(|a| (http::header::ACCEPT, a.parse().unwrap())).into_iter().collect();
        let reply = match answer(&figures, &metrics, &method, &uri.parse().unwrap(), &headers)? {
            Answer::Now(reply) => reply,
            Answer::Later(work) => work(),
            Answer::Wait(work) => work.await,
        };
        let status = reply.status().as_u16();
        let body = http_body_util::BodyExt::collect(reply.into_body()).await.unwrap().to_bytes();
        Some((status, String::from_utf8_lossy(&body).into_owned()))
    }

    #[tokio::test]
    async fn pages() {
        let get = |uri: &'static str| async move { ask(Method::GET, uri, None).await.unwrap() };
        assert_eq!(get("/stats/summary").await, (200, "{\"only\": false}".into()));
        for (uri, only) in [
            ("/stats/summary?only_cpu_and_memory=true", true),
            ("/stats/summary?only_cpu_and_memory=1", false),
            ("/stats/summary?only_cpu_and_memory=true&only_cpu_and_memory=true", false),
        ] {
            assert_eq!(get(uri).await.1, format!("{{\"only\": {only}}}"), "{uri}");
        }
        assert_eq!(ask(Method::POST, "/stats/summary", None).await.unwrap().0, 200);
        assert_eq!(ask(Method::PUT, "/stats/summary", None).await.unwrap(), (405, "405: Method Not Allowed".into()));
        assert_eq!(ask(Method::GET, "/stats/summary", Some("text/plain")).await.unwrap().0, 406);
        assert_eq!(get("/metrics/cadvisor").await, (500, "no groups\n".into()));
        assert_eq!(ask(Method::PUT, "/metrics/resource", None).await.unwrap().0, 200);
        assert!(get("/metrics/probes").await.1.contains("process_start_time_seconds"));
        let main = get("/metrics").await.1;
        assert!(main.ends_with("more 1\n") && main.contains("kubelet_running_pods"));
        assert_eq!(ask(Method::GET, "/stats/other", None).await, None);
        assert_eq!(ask(Method::GET, "/metrics/slis", None).await, None);
    }
}
