//! The mount table and the mount calls that volumes need. Everything here blocks.
//!
//! The table is read from `PROC/self/mountinfo` (proc_pid_mountinfo(5)), since neither `st_dev` nor the mount-root
//! attribute alone tells where below a directory something is mounted.

use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};

use crate::error::{Attempt, Failed, Result};

/// One line of mountinfo.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountEntry {
    /// Mount id, as statx(2) gives it in `stx_mnt_id`.
    pub id: u64,
    /// Mount id of the parent.
    pub parent: u64,
    /// Device number of the files.
    pub device: (u32, u32),
    /// The directory of the filesystem that is mounted here.
    pub root: PathBuf,
    /// Where it is mounted.
    pub mount_point: PathBuf,
    /// Per-mount options (`rw`, `nosuid`, …).
    pub options: Vec<String>,
    /// True when mounts propagate to peers (`shared:N`).
    pub shared: bool,
    /// Filesystem type.
    pub fs_type: String,
    /// What is mounted, as the filesystem names it.
    pub source: String,
    /// Per-superblock options (`size=…`, cgroup controllers, …).
    pub super_options: Vec<String>,
    /// The directory that it was mounted on was removed, in another mount namespace: no path leads there any more, and what has the same name
    /// now is something else.
    pub unreachable: bool,
}

impl MountEntry {
    /// Its files can have SELinux labels of their own.
    pub fn has_labels(&self) -> bool {
        self.super_options.iter().chain(&self.options).any(|o| o == "seclabel")
    }
}

/// What the kernel appends to the name of a directory or file that was removed. No other name has two slashes in it.
const DELETED: &[u8] = b"//deleted";

/// The mounts that this process sees, in mount order.
#[derive(Clone, Debug, Default)]
pub struct MountTable(pub Vec<MountEntry>);

impl MountTable {
    /// Reads `PROC/self/mountinfo`. Blocks.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(proc_root: &Path) -> Result<Self> {
        let path = proc_root.join("self/mountinfo");
        let bytes = std::fs::read(&path).on("read", &path)?;
        Ok(Self::parse(&bytes))
    }

    /// Parses mountinfo. A line that is not one is left out: the kernel only ever adds optional fields.
    pub fn parse(bytes: &[u8]) -> Self {
        Self(bytes.split(|b| *b == b'\n').filter_map(parse_line).collect())
    }

    /// The topmost mount exactly at this path; see [`real`].
    pub fn at(&self, path: &Path) -> Option<&MountEntry> {
        self.0.iter().rev().find(|m| !m.unreachable && m.mount_point == path)
    }

    /// True when something is mounted exactly at this path. The path must be free of symbolic links.
    pub fn is_mount_point(&self, path: &Path) -> bool {
        self.at(path).is_some()
    }

    /// Every mount at or below this path (see [`real`]), deepest first and later ones before those they cover.
    pub fn at_or_below(&self, path: &Path) -> Vec<&MountEntry> {
        let below = |m: &MountEntry| !m.unreachable && m.mount_point.starts_with(path);
        let mut found: Vec<_> = self.0.iter().enumerate().filter(|(_, m)| below(m)).collect();
        found.sort_by_key(|(index, m)| {
            (std::cmp::Reverse(m.mount_point.components().count()), std::cmp::Reverse(*index))
        });
        found.into_iter().map(|(_, m)| m).collect()
    }

    /// As [`MountTable::at_or_below`] without mounts at the path itself.
    pub fn below(&self, path: &Path) -> Vec<&MountEntry> {
        self.at_or_below(path).into_iter().filter(|m| m.mount_point != path).collect()
    }
}

/// mountinfo writes space, tab, newline, backslash (and `#`) as `\` and three octal digits.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, tail @ ..] = rest {
        match (first, tail) {
            (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', tail @ ..]) => {
                out.push(((a - b'0') << 6) | ((b - b'0') << 3) | (c - b'0'));
                rest = tail;
            }
            _ => {
                out.push(*first);
                rest = tail;
            }
        }
    }
    out
}

fn parse_line(line: &[u8]) -> Option<MountEntry> {
    let text = |field: &[u8]| String::from_utf8_lossy(&unescape(field)).into_owned();
    let number = |field: &[u8]| std::str::from_utf8(field).ok()?.parse::<u64>().ok();
    let path = |field: &[u8]| {
        let name = field.strip_suffix(DELETED).unwrap_or(field);
        PathBuf::from(std::ffi::OsString::from_vec(unescape(name)))
    };
    let list = |field: &[u8]| text(field).split(',').map(str::to_owned).collect::<Vec<_>>();

    let mut fields = line.split(|b| *b == b' ').filter(|f| !f.is_empty());
    let id = number(fields.next()?)?;
    let parent = number(fields.next()?)?;
    let (major, minor) = std::str::from_utf8(fields.next()?).ok()?.split_once(':')?;
    let device = (major.parse().ok()?, minor.parse().ok()?);
    let root = path(fields.next()?);
    let mount_field = fields.next()?;
    let (mount_point, unreachable) = (path(mount_field), mount_field.ends_with(DELETED));
    let options = list(fields.next()?);
    let mut shared = false;
    for optional in fields.by_ref() {
        if optional == b"-" {
            break;
        }
        shared |= optional.starts_with(b"shared:");
    }
    let fs_type = text(fields.next()?);
    let source = text(fields.next()?);
    let super_options = fields.next().map(list).unwrap_or_default();
    Some(MountEntry {
        id,
        parent,
        device,
        root,
        mount_point,
        options,
        shared,
        fs_type,
        source,
        super_options,
        unreachable,
    })
}

/// True when something is mounted exactly at this path; a missing path is none. Asks for this path alone (statx(2), kernel 5.8), and
/// reads the whole table only where the kernel cannot say. Blocks.
///
/// # Errors
/// The path or the mount table cannot be read.
pub fn is_mount_point(proc_root: &Path, path: &Path) -> Result<bool> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
    match rustix::fs::statx(CWD, path, flags, StatxFlags::TYPE) {
        Ok(stat) if stat.stx_attributes_mask.contains(StatxAttributes::MOUNT_ROOT) => {
            return Ok(stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT));
        }
        Err(Errno::NOENT) => return Ok(false),
        // An old kernel, or a network mount that does not answer: the table knows.
        _ => {}
    }
    Ok(MountTable::read(proc_root)?.is_mount_point(&real(path)))
}

/// The path as the table has it: links on the way are followed (the agent's root directory may be one), the last part is not looked at. Blocks.
pub fn real(path: &Path) -> PathBuf {
    match path.parent().map(std::fs::canonicalize) {
        Some(Ok(parent)) => parent.join(path.file_name().unwrap_or_default()),
        _ => path.to_owned(),
    }
}

/// How a tmpfs is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tmpfs {
    /// Size in bytes; None: the kernel's default, half of the memory.
    pub size: Option<u64>,
    /// Permission bits of its root directory.
    pub mode: u32,
    /// Ask for `noswap` (kernel 6.4 and newer) so that its content never reaches a swap device.
    pub noswap: bool,
}

/// Mounts a tmpfs. Answers whether `noswap` is in force: kernels without it, and user namespaces, get the mount without. Blocks.
///
/// # Errors
/// The mount call fails.
pub fn mount_tmpfs(target: &Path, tmpfs: Tmpfs) -> Result<bool> {
    let mut options = format!("mode={:o}", tmpfs.mode & 0o7777);
    if let Some(size) = tmpfs.size {
        options.push_str(&format!(",size={size}"));
    }
    let mount = |options: &str| -> Result<()> {
        let what = || format!("mount tmpfs ({options}) at {}", target.display());
        let data = CString::new(options).attempt(what)?;
        rustix::mount::mount("tmpfs", target, "tmpfs", MountFlags::empty(), data.as_c_str()).attempt(what)
    };
    if tmpfs.noswap && mount(&format!("{options},noswap")).is_ok() {
        return Ok(true);
    }
    mount(&options)?;
    Ok(false)
}

/// Mounts a hugetlbfs whose pages have this size in bytes. Blocks.
///
/// # Errors
/// The mount call fails (no such page size, no hugetlbfs).
pub fn mount_hugetlbfs(target: &Path, page_size: u64) -> Result<()> {
    let what = || format!("mount hugetlbfs (pagesize={page_size}) at {}", target.display());
    let data = CString::new(format!("pagesize={page_size}")).attempt(what)?;
    rustix::mount::mount("nodev", target, "hugetlbfs", MountFlags::empty(), data.as_c_str()).attempt(what)
}

/// Binds source onto target; `recursive` takes the mounts below it along. Blocks.
///
/// # Errors
/// The mount call fails.
pub fn bind(source: &Path, target: &Path, recursive: bool) -> Result<()> {
    let what = || format!("bind {} onto {}", source.display(), target.display());
    match recursive {
        true => rustix::mount::mount_bind_recursive(source, target).attempt(what),
        false => rustix::mount::mount_bind(source, target).attempt(what),
    }
}

/// Binds what this descriptor is open on, whatever its name is now, onto target. Blocks.
///
/// # Errors
/// The mount call fails.
pub fn bind_fd(source: impl AsFd, target: &Path) -> Result<()> {
    let link = format!("/proc/self/fd/{}", source.as_fd().as_raw_fd());
    rustix::mount::mount_bind(link.as_str(), target).attempt(|| format!("bind {link} onto {}", target.display()))
}

/// Makes a bind mount read-only; the flags that it already has are kept (the kernel refuses to drop locked ones). Blocks.
///
/// # Errors
/// The mount call fails.
pub fn remount_read_only(proc_root: &Path, target: &Path) -> Result<()> {
    let table = MountTable::read(proc_root)?;
    let mut flags = MountFlags::BIND | MountFlags::RDONLY;
    for option in table.at(&real(target)).map(|m| m.options.as_slice()).unwrap_or_default() {
        flags |= match option.as_str() {
            "nosuid" => MountFlags::NOSUID,
            "nodev" => MountFlags::NODEV,
            "noexec" => MountFlags::NOEXEC,
            "noatime" => MountFlags::NOATIME,
            "nodiratime" => MountFlags::NODIRATIME,
            "relatime" => MountFlags::RELATIME,
            _ => MountFlags::empty(),
        };
    }
    rustix::mount::mount_remount(target, flags, "").attempt(|| format!("remount {} read-only", target.display()))
}

/// Makes this directory a mount point of its own if it is none, and shares its mounts with all peers, those below
/// included, so that mounts made by plugins inside containers reach the host (mount propagation Bidirectional). Blocks.
///
/// # Errors
/// A mount call fails.
pub fn make_rshared(proc_root: &Path, path: &Path) -> Result<()> {
    let real = std::fs::canonicalize(path).on("resolve", path)?;
    let table = MountTable::read(proc_root)?;
    if covering(&table, &real).is_some_and(|m| m.shared) {
        return Ok(());
    }
    if !table.is_mount_point(&real) {
        bind(&real, &real, true)?;
    }
    rustix::mount::mount_change(&real, MountPropagationFlags::SHARED | MountPropagationFlags::REC)
        .attempt(|| format!("share the mounts of {}", real.display()))
}

/// The mount that this path is on.
fn covering<'a>(table: &'a MountTable, path: &Path) -> Option<&'a MountEntry> {
    path.ancestors().find_map(|p| table.at(p))
}

/// Unmounts the topmost mount at this path. A busy or unreachable one is detached, so that it goes when its last user does.
/// Nothing mounted there, or no such path, counts as done. Blocks.
///
/// # Errors
/// The unmount call fails.
pub fn unmount(target: &Path) -> Result<()> {
    let outcome = match rustix::mount::unmount(target, UnmountFlags::NOFOLLOW) {
        Err(Errno::BUSY | Errno::STALE | Errno::HOSTDOWN | Errno::NOTCONN | Errno::IO | Errno::ACCESS) => {
            rustix::mount::unmount(target, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)
        }
        other => other,
    };
    match outcome {
        Ok(()) | Err(Errno::INVAL | Errno::NOENT) => Ok(()),
        Err(e) => Err(Failed::new(format!("unmount {}", target.display()), e)),
    }
}

/// Unmounts everything at or below this path, deepest first, until nothing is left; answers what was unmounted. Blocks.
///
/// # Errors
/// Something stays mounted: the first failure.
pub fn unmount_below(proc_root: &Path, path: &Path) -> Result<Vec<PathBuf>> {
    let real = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let mut done = Vec::new();
    // Stacked mounts, and mounts that propagate back in, may need a further pass.
    for _ in 0..4 {
        let table = MountTable::read(proc_root)?;
        let mounts = table.at_or_below(&real);
        if mounts.is_empty() {
            return Ok(done);
        }
        for mount in mounts {
            unmount(&mount.mount_point)?;
            done.push(mount.mount_point.clone());
        }
    }
    match MountTable::read(proc_root)?.at_or_below(&real).first() {
        None => Ok(done),
        Some(left) => Err(Failed::other(
            format!("unmount everything below {}", path.display()),
            format!("{} is still mounted", left.mount_point.display()),
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::testing::{MountDir, may_mount, put};

    const PROC: &str = "/proc";

    const TABLE: &str = r"22 27 0:21 / /proc rw,relatime - proc proc rw
36 35 98:0 /mnt1 /a\040b rw,noatime shared:1 master:2 - ext3 /dev/root\134x rw,errors=continue
37 36 98:1 / /a\040b/c/d ro - tmpfs tmpfs rw,size=4k
38 36 98:2 / /a\040b/c rw - tmpfs tmpfs rw
39 38 98:3 / /a\040b/c rw - tmpfs tmpfs rw
40 27 98:4 / /a\040bc rw -  ext4 /dev/vdb rw
a line that is none
";

    #[test]
    fn the_table_is_parsed() {
        let table = MountTable::parse(TABLE.as_bytes());
        assert_eq!(table.0.len(), 6);
        let mount = table.at(Path::new("/a b")).unwrap();
        assert_eq!((mount.id, mount.parent, mount.device), (36, 35, (98, 0)));
        assert_eq!(mount.root, Path::new("/mnt1"));
        assert_eq!((mount.shared, mount.fs_type.as_str(), mount.source.as_str()), (true, "ext3", r"/dev/root\x"));
        assert_eq!(mount.options, ["rw", "noatime"]);
        assert_eq!(mount.super_options, ["rw", "errors=continue"]);
        assert_eq!(table.at(Path::new("/a b/c")).unwrap().id, 39, "the topmost");
        assert!(!table.0[0].shared);
        assert_eq!(table.at(Path::new("/a bc")).unwrap().source, "/dev/vdb");
    }

    #[test]
    fn the_deepest_come_first() {
        let table = MountTable::parse(TABLE.as_bytes());
        let ids = |mounts: Vec<&MountEntry>| mounts.iter().map(|m| m.id).collect::<Vec<_>>();
        assert_eq!(ids(table.at_or_below(Path::new("/a b"))), [37, 39, 38, 36]);
        assert_eq!(ids(table.below(Path::new("/a b/c"))), [37]);
        assert!(table.below(Path::new("/a")).is_empty());
    }

    /// A bind of something that was removed is a mount as any other; one whose place was removed is nobody's way.
    #[test]
    fn what_was_removed() {
        let table = MountTable::parse(
            b"1 0 8:1 /pods/u/src//deleted /pods/u/volume-subpaths/v/c/0 rw - ext4 /dev/sda1 rw\n\
              2 0 0:5 / /pods/u/volumes/p/gone//deleted rw - tmpfs tmpfs rw\n\
              3 0 0:6 / /pods/u/volumes/p/deleted rw - tmpfs tmpfs rw\n",
        );
        let points = |mounts: Vec<&MountEntry>| mounts.iter().map(|m| m.mount_point.clone()).collect::<Vec<_>>();
        let bound = table.at(Path::new("/pods/u/volume-subpaths/v/c/0")).unwrap();
        assert_eq!((bound.root.as_path(), bound.unreachable), (Path::new("/pods/u/src"), false));
        // Neither the place that is gone nor one that happens to have the kernel's word for a name.
        assert!(!table.is_mount_point(Path::new("/pods/u/volumes/p/gone")));
        assert!(!table.is_mount_point(Path::new("/pods/u/volumes/p/gone/deleted")));
        assert!(table.at_or_below(Path::new("/pods/u/volumes/p/gone")).is_empty());
        assert_eq!(points(table.at_or_below(Path::new("/pods/u/volumes"))), [Path::new("/pods/u/volumes/p/deleted")]);
    }

    /// Unmounting ends although the table keeps a line for a place that is gone.
    #[test]
    fn a_place_that_is_gone_holds_up_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let (proc, pod) = (dir.path().join("proc"), dir.path().join("pod"));
        std::fs::create_dir_all(pod.join("volumes/p")).unwrap();
        let gone = pod.canonicalize().unwrap().join("volumes/p/gone");
        put(&proc, "self/mountinfo", &format!("2 0 0:5 / {}//deleted rw - tmpfs tmpfs rw\n", gone.display()));
        assert_eq!(unmount_below(&proc, &pod).unwrap(), Vec::<PathBuf>::new());
        crate::fsx::remove_pod_dir(&proc, &pod).unwrap();
        assert!(!pod.exists());
    }

    #[test]
    fn this_machines_table() {
        let table = MountTable::read(Path::new(PROC)).unwrap();
        assert!(table.is_mount_point(Path::new("/proc")));
        assert!(is_mount_point(Path::new(PROC), Path::new("/proc")).unwrap());
        let dir = tempfile::tempdir().unwrap();
        assert!(!is_mount_point(Path::new(PROC), dir.path()).unwrap());
        assert!(!is_mount_point(Path::new(PROC), &dir.path().join("missing")).unwrap());
    }

    #[test]
    fn tmpfs_has_its_size_and_mode() {
        if !may_mount() {
            return;
        }
        let dir = MountDir::new();
        let target = dir.path().join("with space");
        std::fs::create_dir(&target).unwrap();
        mount_tmpfs(&target, Tmpfs { size: Some(1 << 20), mode: 0o1777, noswap: true }).unwrap();
        assert!(is_mount_point(Path::new(PROC), &target).unwrap());
        assert_eq!(std::fs::metadata(&target).unwrap().permissions().mode() & 0o7777, 0o1777);
        let stat = rustix::fs::statvfs(&target).unwrap();
        assert_eq!(stat.f_blocks * stat.f_frsize, 1 << 20);
        unmount(&target).unwrap();
        unmount(&target).unwrap();
        unmount(&dir.path().join("missing")).unwrap();
        assert!(!is_mount_point(Path::new(PROC), &target).unwrap());
        // Without noswap asked for, none is in force.
        assert!(!mount_tmpfs(&target, Tmpfs { size: None, mode: 0o777, noswap: false }).unwrap());
    }

    #[test]
    fn binds_and_their_end() {
        if !may_mount() {
            return;
        }
        let dir = MountDir::new();
        put(dir.path(), "src/inner/file", "x");
        put(dir.path(), "one", "");
        let (src, dst) = (dir.path().join("src"), dir.path().join("dst"));
        std::fs::create_dir_all(&dst).unwrap();
        mount_tmpfs(&src.join("inner"), Tmpfs { size: Some(65_536), mode: 0o755, noswap: false }).unwrap();
        put(&src, "inner/file", "below");
        bind(&src, &dst, true).unwrap();
        bind(&src.join("inner/file"), &dir.path().join("one"), false).unwrap();
        assert_eq!(std::fs::read_to_string(dst.join("inner/file")).unwrap(), "below");
        assert_eq!(std::fs::read_to_string(dir.path().join("one")).unwrap(), "below");

        remount_read_only(Path::new(PROC), &dst).unwrap();
        assert!(std::fs::write(dst.join("new"), "").is_err());
        assert!(std::fs::write(src.join("new"), "").is_ok());

        // A busy mount is detached.
        let _busy = std::fs::File::open(dst.join("inner/file")).unwrap();
        let done = unmount_below(Path::new(PROC), dir.path()).unwrap();
        assert_eq!(done.len(), 4, "{done:?}");
        assert!(MountTable::read(Path::new(PROC)).unwrap().at_or_below(dir.path()).is_empty());
        assert_eq!(std::fs::read_to_string(src.join("inner/file")).unwrap(), "x");
    }

    #[test]
    fn a_directory_is_shared_once() {
        if !may_mount() {
            return;
        }
        let dir = MountDir::new();
        let count = || MountTable::read(Path::new(PROC)).unwrap().at_or_below(dir.path()).len();
        make_rshared(Path::new(PROC), dir.path()).unwrap();
        let first = count();
        make_rshared(Path::new(PROC), dir.path()).unwrap();
        assert_eq!(count(), first);
        let table = MountTable::read(Path::new(PROC)).unwrap();
        assert!(covering(&table, &std::fs::canonicalize(dir.path()).unwrap()).unwrap().shared);
    }
}
