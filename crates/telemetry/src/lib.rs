//! What rubelet says about itself: log lines in klog's form ([`klog`]), a brake against log storms
//! ([`LogLimiter`]), and metrics under the Go kubelet's names ([`metrics`]).
//!
//! [`metrics::Metrics`] is one value that is passed in; only the log subscriber is global, because `tracing` is.

pub mod klog;
mod limit;
pub mod metrics;

pub use limit::LogLimiter;
