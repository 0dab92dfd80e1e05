//! The C library's allocator, told what kind of program this is.
#![allow(unsafe_code)]

/// Keeps the allocator to two arenas. By default glibc gives each new thread one of its own, up to eight for each CPU, and memory that a
/// burst of blocking threads freed stays with theirs. Call it before threads are started. Elsewhere than on glibc it does nothing.
pub fn use_few_arenas() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt(3) takes two integers and changes a parameter of the allocator; both values are ones that it documents.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 2);
    }
}
