//! Waiting until a file of the kernel has something to say.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Registers a file with tokio. Must be called within a runtime.
pub(crate) fn register(file: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd is open and stays the same file until it is dropped, and the AsyncFd owns it from here on.
    let registered = unsafe { AsyncFd::register_with_interest(file, interest) };
    registered.map_err(io::Error::from)
}
