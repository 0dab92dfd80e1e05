//! Sysctls that a pod may set: those known to be safe on this kernel, and those that the configuration allows.

use model::pod::DesiredPod;

use super::Refusal;

/// Kernel namespace that a sysctl belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Namespace {
    Ipc,
    Net,
}

impl Namespace {
    fn name(self) -> &'static str {
        match self {
            Self::Ipc => "IPC",
            Self::Net => "Net",
        }
    }

    /// The namespace of a sysctl, written with dots; None when it is not known to have one.
    fn of(sysctl: &str) -> Option<Self> {
        const IPC: [&str; 10] = [
            "kernel.sem",
            "kernel.shmall",
            "kernel.shmmax",
            "kernel.shmmni",
            "kernel.shm_rmid_forced",
            "kernel.shm",
            "kernel.msgmax",
            "kernel.msgmnb",
            "kernel.msgmni",
            "kernel.msg",
        ];
        if IPC.contains(&sysctl) || sysctl.starts_with("fs.mqueue.") {
            Some(Self::Ipc)
        } else if sysctl.starts_with("net.") {
            Some(Self::Net)
        } else {
            None
        }
    }
}

/// Safe sysctls and the kernel (major, minor) from which on each is namespaced.
const SAFE: [(&str, (u32, u32)); 12] = [
    ("kernel.shm_rmid_forced", (0, 0)),
    ("net.ipv4.ip_local_port_range", (0, 0)),
    ("net.ipv4.tcp_syncookies", (0, 0)),
    ("net.ipv4.ping_group_range", (0, 0)),
    ("net.ipv4.ip_unprivileged_port_start", (0, 0)),
    ("net.ipv4.ip_local_reserved_ports", (3, 16)),
    ("net.ipv4.tcp_keepalive_time", (4, 5)),
    ("net.ipv4.tcp_fin_timeout", (4, 6)),
    ("net.ipv4.tcp_keepalive_intvl", (4, 5)),
    ("net.ipv4.tcp_keepalive_probes", (4, 5)),
    ("net.ipv4.tcp_rmem", (4, 15)),
    ("net.ipv4.tcp_wmem", (4, 15)),
];

/// A pattern of `allowedUnsafeSysctls` that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SysctlPatternError {
    /// It is no name of a sysctl, optionally with `*` at its end.
    #[error(
        "sysctl {0:?} must have at most 253 characters and match regex ^([a-z0-9]([-_a-z0-9]*[a-z0-9])?[\\./])*([a-z0-9][-_a-z0-9]*)?[a-z0-9*]$"
    )]
    Malformed(String),
    /// Setting it would reach beyond the pod.
    #[error("the sysctls {0:?} are not known to be namespaced")]
    NotNamespaced(String),
}

/// Sysctls that pods may set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SysctlAllowlist {
    exact: Vec<(String, Namespace)>,
    prefixes: Vec<(String, Namespace)>,
}

impl SysctlAllowlist {
    /// The safe sysctls of this kernel (`major.minor…`; unknown: only those that every kernel namespaces) and `allowedUnsafeSysctls`.
    ///
    /// # Errors
    /// A pattern of the configuration is malformed or not namespaced.
    pub fn new(kernel: Option<&str>, allowed_unsafe: &[String]) -> Result<Self, SysctlPatternError> {
        let version = kernel.and_then(kernel_version).unwrap_or((0, 0));
        let mut list = Self::default();
        for (name, since) in SAFE {
            if since <= version
                && let Some(ns) = Namespace::of(name)
            {
                list.exact.push((name.to_owned(), ns));
            }
        }
        for pattern in allowed_unsafe {
            if !valid_pattern(pattern) {
                return Err(SysctlPatternError::Malformed(pattern.clone()));
            }
            let name = sysctl_name(pattern);
            let (prefix, starred) = match name.split_once('*') {
                Some((prefix, _)) => (prefix.to_owned(), true),
                None => (name, false),
            };
            let ns = Namespace::of(&prefix).ok_or_else(|| SysctlPatternError::NotNamespaced(prefix.clone()))?;
            if starred { list.prefixes.push((prefix, ns)) } else { list.exact.push((prefix, ns)) }
        }
        Ok(list)
    }

    /// Judges the sysctls of a pod.
    pub(super) fn check(&self, pod: &DesiredPod) -> Result<(), Refusal> {
        let spec = pod.spec();
        for sysctl in spec.security_context.iter().flat_map(|s| s.sysctls.iter().flatten()) {
            let name = sysctl_name(&sysctl.name);
            let found = self
                .exact
                .iter()
                .find(|(n, _)| *n == name)
                .or_else(|| self.prefixes.iter().find(|(p, _)| name.starts_with(p.as_str())));
            let problem = match found {
                None => format!("{name:?} not allowlisted"),
                Some((_, ns)) => {
                    let shared = match ns {
                        Namespace::Ipc => spec.host_ipc.unwrap_or(false),
                        Namespace::Net => pod.host_network(),
                    };
                    if !shared {
                        continue;
                    }
                    format!("{name:?} not allowed with host {} enabled", ns.name())
                }
            };
            return Err(Refusal { reason: "SysctlForbidden".into(), message: format!("forbidden sysctl: {problem}") });
        }
        Ok(())
    }
}

/// The name that the kernel's file is looked up by: `a/b.c/d` becomes `a.b/c.d`; when the first separator is a slash, slashes and dots change places, as the sysctl tool does.
pub fn sysctl_name(name: &str) -> String {
    match name.find(['.', '/']) {
        Some(i) if name.as_bytes()[i] == b'/' => name
            .chars()
            .map(|c| match c {
                '/' => '.',
                '.' => '/',
                c => c,
            })
            .collect(),
        _ => name.to_owned(),
    }
}

fn kernel_version(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// Segments of lower case letters, digits, `-` and `_`, joined by `.` or `/`; `*` only at the very end.
fn valid_pattern(pattern: &str) -> bool {
    if pattern.is_empty() || pattern.len() > 253 {
        return false;
    }
    let (body, starred) = match pattern.strip_suffix('*') {
        Some(body) => (body, true),
        None => (pattern, false),
    };
    if body.is_empty() {
        return starred;
    }
    let word = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit();
    let segments: Vec<&str> = body.split(['.', '/']).collect();
    segments.iter().enumerate().all(|(i, s)| {
        let last = i + 1 == segments.len();
        let bytes = s.as_bytes();
        match (bytes.first(), bytes.last()) {
            // `net.*` leaves an empty last segment.
            (None, _) | (_, None) => last && starred && i > 0,
            (Some(a), Some(z)) => {
                word(*a)
                    && (word(*z) || (last && starred))
                    && bytes.iter().all(|c| word(*c) || matches!(c, b'-' | b'_'))
            }
        }
    })
}
