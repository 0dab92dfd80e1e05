//! What must hold for requests, queries and frames, whatever they are; see [`crate::fuzz`].

use std::future::Future as _;
use std::task::{Context, Poll, Waker};

use http::Method;
use jiff::Timestamp;

use super::authz::attributes;
use super::log_options::LogQuery;
use super::route::{self, Handlers, Known, Route};
use super::{log_query, spdy};

fn handlers(flags: u8) -> Handlers {
    let on = |bit: u8| flags & (1 << bit) != 0;
    Handlers {
        debugging: on(0),
        system_logs: on(1),
        log_query: on(1),
        profiling: on(2),
        debug_flags: on(3),
        checkpoint: on(4),
        flagz: on(5),
        statusz: on(6),
    }
}

pub(crate) fn request(flags: u8, method: &Method, path: &str, query: Option<&str>) {
    let on = handlers(flags);
    match route::route(method, path, query, &on) {
        Route::Redirect(to) => {
            assert!(to.starts_with('/') && !to.starts_with("//"), "{path:?} leads to another host: {to:?}");
            let (next, _) = to.split_once('?').unwrap_or((&to, ""));
            // Twice at the most: cleaned, and then with a slash.
            if let Route::Redirect(again) = route::route(method, next, None, &on) {
                let third = route::route(method, &again, None, &on);
                assert!(!matches!(third, Route::Redirect(_)), "{path:?} leads to {to:?}, {again:?}, {third:?}");
            }
        }
        Route::Unknown => {}
        Route::Known(known) => {
            let path = route::decode(path);
            let fine = attributes(method, &path, true).subresources;
            let coarse = attributes(method, &path, false).subresources;
            let (needed, coarsely): (&[&str], &[&str]) = match &known {
                Known::Logs(_) | Known::Run(_) | Known::Exec(_) | Known::Attach(_) | Known::PortForward(_) => {
                    (&["proxy"], &["proxy"])
                }
                Known::Profile(_) | Known::Verbosity => (&["proxy"], &["proxy"]),
                Known::RunningPods | Known::PodsPage => (&["pods", "proxy"], &["proxy"]),
                Known::Configz => (&["configz", "proxy"], &["proxy"]),
                Known::Flagz => (&["configz"], &["configz"]),
                Known::Statusz => (&["statusz"], &["statusz"]),
                Known::SystemLogs(_) => (&["log"], &["log"]),
                Known::Checkpoint(_) => (&["checkpoint"], &["checkpoint"]),
                Known::Page if path.starts_with("/metrics") => (&["metrics"], &["metrics"]),
                Known::Page if path.starts_with("/stats") => (&["stats"], &["stats"]),
                Known::Page if path.starts_with("/pods") => (&["pods", "proxy"], &["proxy"]),
                Known::Page => (&["healthz", "proxy"], &["proxy"]),
                Known::NoPage | Known::Method(_) | Known::Disabled(_) => return,
            };
            assert_eq!((fine, coarse), (needed, coarsely), "{path:?} is {known:?}");
            if let Known::Logs(of) | Known::Run(of) | Known::Exec(of) | Known::Attach(of) | Known::Checkpoint(of) =
                &known
            {
                for part in [&of.namespace, &of.pod, &of.container] {
                    assert!(!part.is_empty() && !part.contains('/'), "{path:?} is {known:?}");
                }
            }
        }
    }
}

pub(crate) fn query(text: &str) {
    let parameters = route::parameters(Some(text));
    if let Ok(query) = LogQuery::parse(&parameters, Timestamp::UNIX_EPOCH) {
        assert!(query.read.limit_bytes != Some(0), "nothing at all is asked for: {text:?}");
    }
    log_query::check_arguments(&parameters);
}

pub(crate) fn frames(bytes: &[u8]) {
    let mut reader = spdy::Reader::new(bytes);
    let mut context = Context::from_waker(Waker::noop());
    let (mut data, mut said) = (0, 0_usize);
    loop {
        // A slice never keeps its reader waiting.
        let next = std::pin::pin!(reader.next()).poll(&mut context);
        match next {
            Poll::Ready(Ok(Some(spdy::Said::Data(_, piece)))) => data += piece.len(),
            Poll::Ready(Ok(Some(_))) => {}
            Poll::Ready(Ok(None) | Err(_)) => break,
            Poll::Pending => panic!("it waits for more than there is"),
        }
        said += 1;
        assert!(
            data <= bytes.len() && said <= bytes.len() + 1,
            "{said} things with {data} bytes out of {}",
            bytes.len()
        );
    }
}
