//! The simulated node put through what nodes go through.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod life;
mod seeds;
