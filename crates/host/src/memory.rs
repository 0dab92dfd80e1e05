//! The C library's allocator, told what kind of program this is.
#![allow(unsafe_code)]

/// What is larger than this, in bytes, is given back to the system when it is freed: pages of figures, lists of pods.
#[cfg(target_env = "gnu")]
const LARGE: libc::c_int = 512 << 10;
/// Free memory at the end of an arena, in bytes, that is kept for what comes next.
#[cfg(target_env = "gnu")]
const KEPT: libc::c_int = 1 << 20;

/// Keeps the allocator to two arenas and to giving back what is large. By default glibc gives each new thread an arena of its own, up to
/// eight for each CPU, and memory that a burst of blocking threads freed stays with theirs; and after a few large buffers it takes them for
/// usual and keeps up to twice their size. Call it before threads are started. Elsewhere than on glibc it does nothing.
pub fn keep_little() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt(3) takes two integers and changes a parameter of the allocator; all values are ones that it documents.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 2);
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE);
        libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT);
    }
}

/// The allocator's figures, in bytes but for the last one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allocator {
    /// Handed out from its arenas.
    pub in_use: usize,
    /// Held in its arenas.
    pub free: usize,
    /// Handed out as mappings of their own.
    pub mapped: usize,
    /// How many those are.
    pub mappings: usize,
}

/// What the allocator has handed out; None elsewhere than on glibc.
#[must_use]
pub fn allocator() -> Option<Allocator> {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: mallinfo2(3) takes nothing, locks the arenas itself and returns a struct of integers.
        let info = unsafe { libc::mallinfo2() };
        Some(Allocator { in_use: info.uordblks, free: info.fordblks, mapped: info.hblkhd, mappings: info.hblks })
    }
    #[cfg(not(target_env = "gnu"))]
    None
}

#[cfg(test)]
mod tests {
    #[cfg(target_env = "gnu")]
    #[test]
    fn what_is_held_is_counted() {
        let held = std::hint::black_box(vec![1_u8; 64 << 20]);
        let figures = super::allocator().unwrap();
        assert!(figures.in_use + figures.mapped >= held.len(), "{figures:?}");
    }
}
