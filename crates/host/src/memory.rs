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

/// Gives free memory back to the system, also where it lies between what is in use: freed memory at an arena's end goes by itself, but what a burst
/// (many pods at once, a large list) leaves is mostly full of holes. It takes some milliseconds for 100 MB, in which other threads wait for the
/// allocator. Elsewhere than on glibc it does nothing.
pub fn give_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim(3) takes how much to leave at the end of an arena, locks the arenas itself and touches only memory that is free.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Memory of this process that is resident and its own (not a file's), in bytes; None when the kernel does not say.
#[must_use]
pub fn resident() -> Option<usize> {
    let (all, shared) = statm()?;
    Some(all.saturating_sub(shared))
}

/// Pages of files that are mapped and resident, most of them the program's, in bytes; None when the kernel does not say.
#[must_use]
pub fn resident_files() -> Option<usize> {
    Some(statm()?.1)
}

/// Resident memory, and what of it is of files or shared; in bytes.
fn statm() -> Option<(usize, usize)> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let mut pages = statm.split_whitespace().skip(1).map_while(|n| n.parse::<usize>().ok());
    let page = rustix::param::page_size();
    Some((pages.next()? * page, pages.next()? * page))
}

/// Lets go of the program's own code and constants: what is needed comes back from the kernel's cache of the file with the next touch, 64 KiB at a
/// time, and what ran at the start only does not. Elsewhere than on Linux with glibc it does nothing.
pub fn let_go_of_code() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        let mut segments: Vec<(usize, usize)> = Vec::new();
        // SAFETY: dl_iterate_phdr(3) calls `program_segments` during this call only, with the pointer to `segments`, which outlives it.
        unsafe {
            libc::dl_iterate_phdr(Some(program_segments), std::ptr::from_mut(&mut segments).cast());
        }
        for (from, length) in segments {
            // SAFETY: these are whole pages of segments that the program's header maps from its file without the right to write, so none of them holds anything
            // but the file's content, and the next touch maps that again. A failure leaves things as they are.
            unsafe {
                libc::madvise(from as *mut libc::c_void, length, libc::MADV_DONTNEED);
            }
        }
    }
}

/// Takes down the segments of the program itself that were never writable, in whole pages: those of its header with that right hold relocated
/// addresses, even where they were protected afterwards.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
unsafe extern "C" fn program_segments(
    info: *mut libc::dl_phdr_info,
    _: libc::size_t,
    segments: *mut libc::c_void,
) -> libc::c_int {
    // SAFETY: the caller, dl_iterate_phdr(3), passes a valid `info`, whose header stays as long as the object is loaded, and what `let_go_of_code` gave it.
    let (info, segments) = unsafe { (&*info, &mut *segments.cast::<Vec<(usize, usize)>>()) };
    // SAFETY: as above; the header has that many entries.
    let header = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
    let page = rustix::param::page_size();
    for segment in header.iter().filter(|s| s.p_type == libc::PT_LOAD && s.p_flags & libc::PF_W == 0) {
        let from = info.dlpi_addr as usize + segment.p_vaddr as usize;
        // A page that is shared with the next segment is that one's.
        let (first, end) = (from.next_multiple_of(page), (from + segment.p_filesz as usize) / page * page);
        if end > first {
            segments.push((first, end - first));
        }
    }
    // The first object is the program; the others, the C library for one, are shared with other programs.
    1
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
    fn what_lies_between_is_given_back() {
        // Too small for mappings of their own; every other one stays, and with it what would be the arena's end.
        let mut all: Vec<Option<Vec<u8>>> =
            (0..2000).map(|_| Some(std::hint::black_box(vec![1_u8; 16 << 10]))).collect();
        all.iter_mut().step_by(2).for_each(|one| *one = None);
        let before = super::resident().unwrap();
        super::give_back();
        let after = super::resident().unwrap();
        assert!(after + (8 << 20) < before, "{before} before, {after} after");
        drop(all);
    }

    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    #[test]
    fn code_that_was_let_go_of_comes_back() {
        let used = || (0..1000).map(|n| format!("{n:e} {n:?}").len()).sum::<usize>();
        let (expected, text) = (used(), "a constant of the program".to_owned());
        for _ in 0..3 {
            super::let_go_of_code();
            assert_eq!(used(), expected);
            assert_eq!(std::hint::black_box("a constant of the program"), text);
        }
        // What does not run again stays away.
        let before = super::resident_files().unwrap();
        super::let_go_of_code();
        let after = super::resident_files().unwrap();
        assert!(after < before, "{before} before, {after} after");
    }

    #[cfg(target_env = "gnu")]
    #[test]
    fn what_is_held_is_counted() {
        let held = std::hint::black_box(vec![1_u8; 64 << 20]);
        let figures = super::allocator().unwrap();
        assert!(figures.in_use + figures.mapped >= held.len(), "{figures:?}");
    }
}
