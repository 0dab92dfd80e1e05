//! Bad ways to the API server: a proxy that loses what it should carry, and a gate that keeps some requests waiting.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection, StreamOwned};

use super::pki::Pair;

/// How often something that waits looks whether it is to end.
const LOOK: Duration = Duration::from_millis(50);

/// What a [`Proxy`] does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Way {
    /// It carries everything.
    Open,
    /// It takes new connections and loses what they carry, without a word.
    Lost,
    /// Nobody listens.
    Closed,
}

#[derive(Debug)]
struct Shared {
    target: SocketAddr,
    way: AtomicU8,
    accepted: AtomicU64,
    /// Connections up to this number carry nothing any more.
    lost: AtomicU64,
    ended: AtomicBool,
    sockets: Mutex<Vec<TcpStream>>,
}

impl Shared {
    fn is(&self, way: Way) -> bool {
        self.way.load(Ordering::SeqCst) == way as u8
    }
}

/// A proxy of TCP connections, which may begin to lose their bytes in both directions while they stay open.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

impl Proxy {
    /// A way to `target` through `port` of the loopback address.
    ///
    /// # Errors
    /// When the port is taken.
    pub fn start(port: u16, target: SocketAddr) -> Result<Self> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let listener = listen(address)?;
        let shared = Arc::new(Shared {
            target,
            way: AtomicU8::new(Way::Open as u8),
            accepted: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            ended: AtomicBool::new(false),
            sockets: Mutex::default(),
        });
        let accepting = Arc::clone(&shared);
        thread::spawn(move || accept(&accepting, address, listener));
        Ok(Self { address, shared })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Changes what becomes of new connections; open ones stay as they are. Returns when it is so.
    pub fn set(&self, way: Way) {
        self.shared.way.store(way as u8, Ordering::SeqCst);
        let closed = || TcpListener::bind(self.address).is_ok();
        // A listener that is gone is seen by another one being possible.
        crate::poll(Duration::from_secs(5), || (way == Way::Closed) == closed());
    }

    /// From now on the connections that are open carry nothing. New ones do.
    pub fn lose_connections(&self) {
        self.shared.lost.store(self.shared.accepted.load(Ordering::SeqCst), Ordering::SeqCst);
    }

    /// How many connections were taken so far.
    pub fn accepted(&self) -> u64 {
        self.shared.accepted.load(Ordering::SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::SeqCst);
        for socket in self.shared.sockets.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

fn listen(address: SocketAddr) -> Result<TcpListener> {
    let listener = TcpListener::bind(address).with_context(|| format!("cannot listen on {address}"))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn accept(shared: &Arc<Shared>, address: SocketAddr, first: TcpListener) {
    let mut listener = Some(first);
    while !shared.ended.load(Ordering::SeqCst) {
        if shared.is(Way::Closed) {
            listener = None;
        } else if listener.is_none() {
            listener = listen(address).ok();
        }
        match listener.as_ref().map(TcpListener::accept) {
            Some(Ok((client, _))) => {
                let number = shared.accepted.fetch_add(1, Ordering::SeqCst) + 1;
                let shared = Arc::clone(shared);
                let born_lost = shared.is(Way::Lost);
                thread::spawn(move || carry(&shared, client, number, born_lost));
            }
            _ => thread::sleep(LOOK / 5),
        }
    }
}

/// Both directions of a connection, until one side ends it.
fn carry(shared: &Arc<Shared>, client: TcpStream, number: u64, born_lost: bool) {
    let Ok(server) = TcpStream::connect(shared.target) else { return };
    let _ =
        client.set_nonblocking(false).and_then(|()| client.set_nodelay(true)).and_then(|()| server.set_nodelay(true));
    let (Ok(client_too), Ok(server_too)) = (client.try_clone(), server.try_clone()) else { return };
    let kept = [&client, &server].map(|s| s.try_clone());
    shared.sockets.lock().unwrap_or_else(PoisonError::into_inner).extend(kept.into_iter().flatten());
    let is_lost = move |shared: &Shared| born_lost || number <= shared.lost.load(Ordering::SeqCst);
    let back = Arc::clone(shared);
    thread::spawn(move || pump(server_too, client_too, || is_lost(&back)));
    pump(client, server, || is_lost(shared));
}

fn pump(mut from: TcpStream, mut to: TcpStream, is_lost: impl Fn() -> bool) {
    let mut buffer = vec![0; 16 << 10];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        if !is_lost() && to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    // An end is lost as everything else is: the other side learns nothing.
    if !is_lost() {
        let _ = to.shutdown(Shutdown::Both);
    }
}

/// Stands before the API server as one node's client and keeps requests of some paths waiting. It speaks HTTP/1.1, one request a
/// connection.
#[derive(Debug)]
pub struct Gate {
    address: SocketAddr,
    shared: Arc<GateShared>,
}

#[derive(Debug)]
struct GateShared {
    target: SocketAddr,
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
    /// Requests whose path begins so wait.
    held: Mutex<Option<String>>,
    waiting: AtomicU64,
    ended: AtomicBool,
}

impl Gate {
    /// A gate before `target`, known by the certificate `own`; it asks as the user of `node`. `authority` signed all three.
    ///
    /// # Errors
    /// When a file cannot be read, or the port is taken.
    pub(super) fn start(
        port: u16,
        target: SocketAddr,
        authority: &std::path::Path,
        own: &Pair,
        node: &Pair,
    ) -> Result<Self> {
        let read = |file: &std::path::Path| fs::read(file).with_context(|| format!("cannot read {}", file.display()));
        let pair = |pair: &Pair| -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)> {
            Ok((
                vec![CertificateDer::from_pem_slice(&read(&pair.certificate)?)?],
                PrivateKeyDer::from_pem_slice(&read(&pair.key)?)?,
            ))
        };
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(&read(authority)?)?)?;
        let (chain, key) = pair(node)?;
        let client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)?;
        let (chain, key) = pair(own)?;
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(chain, key)?;
        server.alpn_protocols = vec![b"http/1.1".to_vec()];
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let listener = listen(address)?;
        let shared = Arc::new(GateShared {
            target,
            server: Arc::new(server),
            client: Arc::new(client),
            held: Mutex::default(),
            waiting: AtomicU64::new(0),
            ended: AtomicBool::new(false),
        });
        let accepting = Arc::clone(&shared);
        thread::spawn(move || {
            while !accepting.ended.load(Ordering::SeqCst) {
                match listener.accept() {
                    Ok((socket, _)) => {
                        let shared = Arc::clone(&accepting);
                        // Whatever goes wrong ends the connection, and its client sees that.
                        thread::spawn(move || drop(shared.pass(socket)));
                    }
                    Err(_) => thread::sleep(LOOK / 5),
                }
            }
        });
        Ok(Self { address, shared })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// From now on requests whose path begins so wait; None: none any more.
    pub fn hold(&self, path: Option<&str>) {
        *self.shared.held.lock().unwrap_or_else(PoisonError::into_inner) = path.map(str::to_owned);
    }

    /// How many requests it has kept waiting so far.
    pub fn held(&self) -> u64 {
        self.shared.waiting.load(Ordering::SeqCst)
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::SeqCst);
    }
}

impl GateShared {
    fn is_held(&self, path: &str) -> bool {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.as_ref().is_some_and(|prefix| path.starts_with(prefix))
    }

    fn pass(&self, socket: TcpStream) -> io::Result<()> {
        socket.set_nonblocking(false)?;
        socket.set_nodelay(true)?;
        let session = ServerConnection::new(Arc::clone(&self.server)).map_err(io::Error::other)?;
        let mut client = StreamOwned::new(session, socket);
        let mut request = Vec::new();
        let mut buffer = [0; 4096];
        let end = loop {
            if let Some(at) = request.windows(4).position(|w| w == b"\r\n\r\n") {
                break at;
            }
            match client.read(&mut buffer)? {
                0 => return Ok(()),
                count => request.extend_from_slice(&buffer[..count]),
            }
        };
        let head = String::from_utf8_lossy(&request[..end]).into_owned();
        let length = head
            .lines()
            .filter_map(|l| l.split_once(':'))
            .find(|(name, _)| name.eq_ignore_ascii_case("content-length"));
        let length: usize = length.and_then(|(_, value)| value.trim().parse().ok()).unwrap_or(0);
        while request.len() < end + 4 + length {
            match client.read(&mut buffer)? {
                0 => return Ok(()),
                count => request.extend_from_slice(&buffer[..count]),
            }
        }
        let path = head.split(' ').nth(1).unwrap_or_default();
        if self.is_held(path) {
            self.waiting.fetch_add(1, Ordering::SeqCst);
            while self.is_held(path) && !self.ended.load(Ordering::SeqCst) {
                thread::sleep(LOOK);
            }
        }
        let socket = TcpStream::connect(self.target)?;
        socket.set_nodelay(true)?;
        socket.set_read_timeout(Some(LOOK * 10))?;
        let name = ServerName::IpAddress(self.target.ip().into());
        let session = ClientConnection::new(Arc::clone(&self.client), name).map_err(io::Error::other)?;
        let mut server = StreamOwned::new(session, socket);
        // So that the server's end of the connection is the end of the answer.
        server.write_all(&[&request[..end], b"\r\nConnection: close", &request[end..]].concat())?;
        server.flush()?;
        let mut buffer = vec![0; 16 << 10];
        while !self.ended.load(Ordering::SeqCst) {
            match server.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => {
                    client.write_all(&buffer[..count])?;
                    client.flush()?;
                }
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
                Err(_) => break,
            }
        }
        client.conn.send_close_notify();
        client.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_carried_lost_and_carried_again() {
        let echo = TcpListener::bind("127.0.0.1:0").unwrap();
        let target = echo.local_addr().unwrap();
        thread::spawn(move || {
            for stream in echo.incoming().flatten() {
                thread::spawn(move || {
                    let mut reader = stream.try_clone().unwrap();
                    let _ = io::copy(&mut reader, &mut &stream);
                });
            }
        });
        let [port] = crate::free_ports().unwrap();
        let proxy = Proxy::start(port, target).unwrap();
        let connect = || {
            let stream = TcpStream::connect(proxy.address()).unwrap();
            stream.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
            stream
        };
        let answers = |mut stream: &TcpStream| {
            stream.write_all(b"x").unwrap();
            stream.read(&mut [0]).is_ok_and(|n| n == 1)
        };
        let first = connect();
        assert!(answers(&first));
        proxy.lose_connections();
        assert!(!answers(&first));
        let second = connect();
        assert!(answers(&second));
        proxy.set(Way::Lost);
        assert!(!answers(&connect()));
        assert!(answers(&second), "what is open stays as it is");
        proxy.set(Way::Closed);
        assert!(TcpStream::connect(proxy.address()).is_err());
        proxy.set(Way::Open);
        assert!(answers(&connect()));
        assert!(!answers(&first), "what is lost stays lost");
        assert_eq!(proxy.accepted(), 4);
    }
}
