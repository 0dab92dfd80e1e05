//! The generated gRPC clients.
#![allow(missing_docs, unreachable_pub, clippy::all)]

tonic::include_proto!("runtime.v1");
