//! The service notification protocol of systemd (sd_notify(3)), spoken over the socket that the caller names.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use crate::error::{Attempt, Failed, Result};

/// What the service manager is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// Start-up is over.
    Ready,
    /// The service is going down.
    Stopping,
    /// Alive; due at least every `WATCHDOG_USEC` / 2.
    Watchdog,
    /// A line for `systemctl status`.
    Status(String),
}

impl Notice {
    fn text(&self) -> String {
        match self {
            Self::Ready => "READY=1".into(),
            Self::Stopping => "STOPPING=1".into(),
            Self::Watchdog => "WATCHDOG=1".into(),
            Self::Status(line) => format!("STATUS={}", line.replace('\n', " ")),
        }
    }
}

/// Sends one notice to the socket that `NOTIFY_SOCKET` named: a path, or an abstract name after `@`.
/// Blocks no longer than a datagram takes.
///
/// # Errors
/// The socket's name is neither, or nobody listens there.
pub fn notify(socket: &str, notice: &Notice) -> Result<()> {
    let what = || format!("notify the service manager at {socket}");
    let address = match socket.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        [b'/', ..] => SocketAddr::from_pathname(socket),
        _ => return Err(Failed::other(what(), "NOTIFY_SOCKET is neither a path nor an abstract name")),
    }
    .attempt(what)?;
    let sender = UnixDatagram::unbound().attempt(what)?;
    sender.send_to_addr(notice.text().as_bytes(), &address).attempt(what)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn received(socket: &UnixDatagram) -> String {
        let mut buffer = [0; 128];
        let n = socket.recv(&mut buffer).unwrap();
        String::from_utf8(buffer[..n].to_vec()).unwrap()
    }

    #[test]
    fn a_path_is_notified() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let listener = UnixDatagram::bind(&path).unwrap();
        let name = path.to_str().unwrap();
        notify(name, &Notice::Ready).unwrap();
        assert_eq!(received(&listener), "READY=1");
        notify(name, &Notice::Status("a\nb".into())).unwrap();
        assert_eq!(received(&listener), "STATUS=a b");
    }

    #[test]
    fn an_abstract_name_is_notified() {
        let name = format!("rubelet-sysd-{}", std::process::id());
        let listener = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        notify(&format!("@{name}"), &Notice::Watchdog).unwrap();
        assert_eq!(received(&listener), "WATCHDOG=1");
        notify(&format!("@{name}"), &Notice::Stopping).unwrap();
        assert_eq!(received(&listener), "STOPPING=1");
    }

    #[test]
    fn nobody_there_is_an_error() {
        assert!(notify("/nonexistent/notify", &Notice::Ready).unwrap_err().is_not_found());
        assert!(notify("relative", &Notice::Ready).is_err());
    }
}
