//! What strangers send, for `testing/fuzz`: each function takes bytes and panics when something is wrong. Not for others.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::http::{Get, Tls};
use crate::prober::Found;

/// What is kept of a pod over a restart: either file is read as the other too.
pub fn kept(bytes: &[u8]) {
    let _ = serde_json::from_slice::<BTreeMap<String, Found>>(bytes);
    crate::sync::kept::read_end(bytes);
}

/// Answers to a probe, byte by byte as they come.
pub const ANSWERS: &[&[u8]] = &[
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
    b"HTTP/1.1 302 Found\r\nLocation: /elsewhere?a=b#c\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    b"HTTP/1.0 503 No\r\nLocation: https://10.0.0.9:80/x\r\n\r\nbody to the end",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 307 T\r\nLocation: //h:1/../x\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 301 M\r\nLocation: http://h/./a/../b?c\r\nContent-Length: 99999999999\r\n\r\nx",
];

/// An answer: no more of it is taken than was asked for, and a redirect leads to the same host, or is the answer.
///
/// # Panics
/// When something is wrong.
pub fn answer(bytes: &[u8]) {
    const MOST: usize = 1024;
    let get = Get { host: "h", port: 80, tls: Tls::Off, path: "/p", agent: "a", headers: Vec::new(), body_max: MOST };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
    let Ok(runtime) = runtime else { panic!("no runtime to try it in") };
    runtime.block_on(async {
        let (near, mut far) = tokio::io::duplex(64 << 10);
        let served = async {
            let mut head = [0; 512];
            let _ = far.read(&mut head).await;
            let _ = far.write_all(bytes).await;
            drop(far);
        };
        let limit = Duration::from_secs(3600);
        let (answer, ()) = tokio::join!(tokio::time::timeout(limit, get.over(near)), served);
        let Ok(answer) = answer else { panic!("it waits for more, though the connection is closed") };
        let Ok(answer) = answer else { return };
        assert!(answer.body.len() <= MOST, "{} bytes", answer.body.len());
        let Some(location) = &answer.location else { return };
        let elsewhere = |uri: http::Uri| {
            let host = uri.scheme().and(uri.host()).map(|h| !h.eq_ignore_ascii_case("h"));
            host == Some(true)
        };
        assert!(!(get.stays(location) && location.parse().is_ok_and(elsewhere)), "{location:?} is followed");
    });
}
