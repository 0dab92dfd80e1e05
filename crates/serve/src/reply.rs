//! Answers: the few shapes that Go's HTTP libraries give to text, errors and JSON.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE, HeaderName, HeaderValue, LOCATION, X_CONTENT_TYPE_OPTIONS};
use http::{Method, Response, StatusCode};
use hyper::body::{Body, Frame, SizeHint};
use serde::Serialize;
use tokio::sync::OwnedSemaphorePermit;

pub(crate) const TEXT: &str = "text/plain; charset=utf-8";
pub(crate) const HTML: &str = "text/html; charset=utf-8";
pub(crate) const JSON: &str = "application/json";

/// An answer in full.
pub(crate) type Reply = Response<ReplyBody>;

/// How a request is answered.
pub(crate) enum Answer {
    /// At once, on the connection's task.
    Now(Reply),
    /// By work that copies and serialises much: done on a thread of its own, and only so many at a time.
    Later(Box<dyn FnOnce() -> Reply + Send>),
    /// By work that waits for others; as `Later` only so many at a time.
    Wait(Pin<Box<dyn Future<Output = Reply> + Send>>),
}

/// A body made in one piece.
#[derive(Debug)]
pub(crate) struct ReplyBody {
    data: Option<Bytes>,
    /// Held until the client has taken the answer, so that slow clients cannot pile up large answers.
    permit: Option<OwnedSemaphorePermit>,
}

impl ReplyBody {
    pub(crate) fn new(body: impl Into<Bytes>) -> Self {
        Self { data: Some(body.into()).filter(|data| !data.is_empty()), permit: None }
    }

    pub(crate) fn hold(&mut self, permit: OwnedSemaphorePermit) {
        self.permit = Some(permit);
    }
}

impl Body for ReplyBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        Poll::Ready(self.get_mut().data.take().map(|data| Ok(Frame::data(data))))
    }

    fn is_end_stream(&self) -> bool {
        self.data.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.data.as_ref().map_or(0, |data| data.len() as u64))
    }
}

/// An answer with a body.
pub(crate) fn reply(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Reply {
    let mut reply = Response::new(ReplyBody::new(body));
    *reply.status_mut() = status;
    with(reply, CONTENT_TYPE, HeaderValue::from_static(content_type))
}

fn with(mut reply: Reply, name: HeaderName, value: HeaderValue) -> Reply {
    reply.headers_mut().insert(name, value);
    reply
}

/// Text that is no error.
pub(crate) fn text(body: impl Into<Bytes>) -> Reply {
    reply(StatusCode::OK, TEXT, body)
}

/// Marks an answer as not to be guessed at by browsers.
pub(crate) fn nosniff(reply: Reply) -> Reply {
    with(reply, X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"))
}

/// An error as net/http's `Error` writes it: the message and a line end.
pub(crate) fn error(status: StatusCode, message: &str) -> Reply {
    nosniff(reply(status, TEXT, format!("{message}\n")))
}

/// An unknown path, as net/http's mux answers it.
pub(crate) fn not_found() -> Reply {
    error(StatusCode::NOT_FOUND, "404 page not found")
}

/// A redirect to the path with a slash at its end, as net/http's mux answers it.
pub(crate) fn redirect(method: &Method, to: &'static str) -> Reply {
    let body = match *method {
        Method::GET => format!("<a href=\"{to}\">Temporary Redirect</a>.\n\n"),
        _ => String::new(),
    };
    let reply = reply(StatusCode::TEMPORARY_REDIRECT, "text/html; charset=utf-8", body);
    with(reply, LOCATION, HeaderValue::from_static(to))
}

/// A redirect to where the path should have led, as net/http's mux answers it.
pub(crate) fn redirect_to(method: &Method, to: &str) -> Reply {
    let escaped =
        to.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&#34;").replace('\'', "&#39;");
    let mut reply = match *method {
        Method::GET | Method::HEAD => reply(
            StatusCode::TEMPORARY_REDIRECT,
            "text/html; charset=utf-8",
            format!("<a href=\"{escaped}\">Temporary Redirect</a>.\n\n"),
        ),
        _ => Response::new(ReplyBody::new(Bytes::new())),
    };
    *reply.status_mut() = StatusCode::TEMPORARY_REDIRECT;
    match HeaderValue::from_str(to) {
        Ok(location) => with(reply, LOCATION, location),
        Err(_) => not_found(),
    }
}

/// An error as go-restful writes it: `405: Method Not Allowed`, without a line end.
pub(crate) fn service_error(status: StatusCode, message: impl Into<Bytes>) -> Reply {
    reply(status, TEXT, message)
}

/// States which method is allowed, beside a 405.
pub(crate) fn allow_get(reply: Reply) -> Reply {
    with(reply, ALLOW, HeaderValue::from_static("GET"))
}

/// A value as JSON, serialised once.
pub(crate) fn json(status: StatusCode, value: &impl Serialize) -> Reply {
    match serde_json::to_vec(value) {
        Ok(body) => reply(status, JSON, body),
        Err(cause) => error(StatusCode::INTERNAL_SERVER_ERROR, &format!("encoding the answer: {cause}")),
    }
}
