//! What strangers send, for `testing/fuzz`: each function takes bytes and panics when something is wrong. Not for others.

use http::Method;

use crate::secure::fuzz as inner;

/// Flags in the first byte, then a method and a path with its query.
pub const REQUESTS: &[&[u8]] = &[
    b"\xffGET /containerLogs/default/web/c?follow=true&tailLines=10&stream=Stdout",
    b"\xffPOST /exec/default/web/uid/c?command=sh&input=1&output=1",
    b"\xffGET /attach/default/web/c",
    b"\xffPOST /portForward/default/web?port=80",
    b"\xffPOST /run/default/web/c?cmd=ls",
    b"\xffGET /logs/pods/../x",
    b"\xffGET /pods%2f..%2fexec/a/b/c",
    b"\xffGET /stats/summary?only_cpu_and_memory=true",
    b"\xffGET /metrics/cadvisor",
    b"\x0fGET /debug/pprof/profile?seconds=3",
    b"\xffPUT /debug/flags/v",
    b"\xffGET /debug/pods?namespace=a",
    b"\xffPOST /checkpoint/default/web/c?timeout=3",
    b"\xffGET /runningpods/",
    b"\xffGET /configz",
    b"\xffGET /flagz",
    b"\xffGET /statusz",
    b"\xffGET /healthz/ping",
    b"\x00GET /exec",
    b"\xffGET //metrics/./../pods/",
];

/// Queries of logs and of the node's logs.
pub const QUERIES: &[&[u8]] = &[
    b"follow=true&previous=false&tailLines=10&sinceSeconds=5&limitBytes=7&timestamps=1",
    b"sinceTime=2026-11-29T01:02:03Z&stream=Stderr",
    b"query=kubelet&query=containerd.service&sinceTime=2026-11-29T01:02:03Z&untilTime=2026-11-30T01:02:03Z&tailLines=9&boot=-1&pattern=a(b%7Cc)",
    b"query=/pods/x.log",
    b"pattern=%5Ba-&query=x&boot=0",
    b"port=80,443&port=8080&input=1&tty=1",
];

/// Frames of SPDY as a runtime's streaming server sends them.
pub const FRAMES: &[&[u8]] = &[
    b"\x80\x03\0\x02\0\0\0\x06\0\0\0\x01\0\0\0\0\0\x01\0\0\0\x05hello\0\0\0\x01\x01\0\0\0",
    b"\x80\x03\0\x06\0\0\0\x04\0\0\0\x02\x80\x03\0\x07\0\0\0\x08\0\0\0\0\0\0\0\0",
    b"\x80\x03\0\x03\0\0\0\x08\0\0\0\x07\0\0\0\x05\x80\x03\0\x04\0\0\0\x04\0\0\0\0",
];

/// A request: it is for one thing, a redirect leads somewhere, and what it is for is what the caller was asked to be allowed.
pub fn request(bytes: &[u8]) {
    let Some((flags, rest)) = bytes.split_first() else { return };
    let text = String::from_utf8_lossy(rest);
    let (method, target) = text.split_once(' ').unwrap_or(("GET", &text));
    let Ok(method) = method.parse::<Method>() else { return };
    let (path, query) = target.split_once('?').map_or((target, None), |(path, query)| (path, Some(query)));
    inner::request(*flags, &method, path, query);
}

/// A query, for all that take one.
pub fn query(bytes: &[u8]) {
    inner::query(&String::from_utf8_lossy(bytes));
}

/// What comes from a runtime: reading ends, and gives no more than came.
pub fn frames(bytes: &[u8]) {
    inner::frames(bytes);
}
