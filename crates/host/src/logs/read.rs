//! What a container wrote, out of its log in CRI form: `TIME STREAM TAGS CONTENT`, one line each; a line tagged `P` goes on in the next one.
//!
//! Content is passed on as it is read, so that neither a long line nor a slow receiver costs memory. Rotated files are not read: like Go's, a
//! reader begins in the newest file, and goes on to the next one only while it follows ([`LogReader::replaced`], [`LogReader::reopen`]).

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use jiff::Timestamp;

use crate::safe_path::{open_beneath, open_held, open_root};

use super::{GZIP, TEMPORARY, ends_with, siblings, tail_offset};

/// Bytes asked of the file at once; what one [`LogReader::read`] adds is about as much.
const CHUNK: usize = 64 << 10;
/// Time, stream and tags of a line are shorter than this, or the line is none of a runtime's.
const MAX_HEAD: usize = 256;

/// One of a container's outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// What of a log is wanted (PodLogOptions).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReadOptions {
    /// Begin this many lines before the end. Counts the file's lines, of which a long line of output takes several.
    pub tail: Option<u64>,
    /// Stop after the lines of `tail`, even if there are more by then.
    pub stop_after_tail: bool,
    /// Stop after this many bytes of output.
    pub limit_bytes: Option<u64>,
    /// Leave out what was written before.
    pub since: Option<Timestamp>,
    /// Put the time before each line.
    pub timestamps: bool,
    /// Only this output.
    pub stream: Option<Stream>,
}

/// How far a reading came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// There may be more.
    More,
    /// The end of what is written by now.
    CaughtUp,
    /// Everything that was asked for.
    Done,
}

/// Where in a line the reader is.
#[derive(Debug)]
enum At {
    /// In time, stream and tags.
    Head,
    /// In the content.
    Content { wanted: bool, partial: bool, length: u64 },
    /// In a line that cannot be read.
    Broken,
}

/// Reads one container's log.
#[derive(Debug)]
pub struct LogReader {
    path: PathBuf,
    /// Where links may lead.
    root: PathBuf,
    file: File,
    options: ReadOptions,
    at: At,
    head: Vec<u8>,
    /// The next content begins a line of output.
    line_start: bool,
    lines_left: Option<u64>,
    bytes_left: Option<u64>,
}

impl LogReader {
    /// Opens a log and finds where to begin. Links are followed where they lead to files below `root`, now and with every file that is gone on to: a
    /// pod that can write among the logs must not have one stand for any file of the host.
    ///
    /// # Errors
    /// The file cannot be opened or read; `PermissionDenied`: a link leads elsewhere.
    pub fn open(path: &Path, root: &Path, options: ReadOptions) -> io::Result<Self> {
        let mut file = open_file(path, root)?;
        if let Some(lines) = options.tail {
            let offset = tail_offset(&mut file, lines)?;
            file.seek(SeekFrom::Start(offset))?;
        }
        Ok(Self {
            path: path.to_owned(),
            root: root.to_owned(),
            file,
            at: At::Head,
            head: Vec::new(),
            line_start: true,
            lines_left: options.tail.filter(|_| options.stop_after_tail),
            bytes_left: options.limit_bytes,
            options,
        })
    }

    /// The log's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Adds the next output to `out`.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(&mut self, out: &mut Vec<u8>) -> io::Result<Progress> {
        let mut chunk = vec![0; CHUNK];
        let enough = out.len() + CHUNK / 2;
        while out.len() < enough {
            if self.lines_left == Some(0) || self.bytes_left == Some(0) {
                return Ok(Progress::Done);
            }
            let n = match self.file.read(&mut chunk) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                n => n?,
            };
            if n == 0 {
                return Ok(Progress::CaughtUp);
            }
            if self.take(&chunk[..n], out) {
                return Ok(Progress::Done);
            }
        }
        Ok(Progress::More)
    }

    /// True when the log's name is that of another file by now: it was rotated. False while the name is that of none.
    pub fn replaced(&self) -> bool {
        match (self.file.metadata(), std::fs::metadata(&self.path)) {
            (Ok(held), Ok(named)) => (held.dev(), held.ino()) != (named.dev(), named.ino()),
            _ => false,
        }
    }

    /// Goes on to the next file: the one that the log's name was given to when this one was rotated, which may have been rotated itself since. What
    /// is compressed by then is passed over, as Go does. Answers whether that file, too, is complete: others have come after it.
    ///
    /// # Errors
    /// The files cannot be listed or opened; `PermissionDenied`: the log's name is a link that leads out of the logs by now.
    pub fn reopen(&mut self) -> io::Result<bool> {
        let held = self.file.metadata()?;
        let plain = |p: &PathBuf| !ends_with(p, GZIP) && !ends_with(p, TEMPORARY);
        let open = |path: &Path| -> io::Result<_> {
            let file = open_file(path, &self.root)?;
            let found = file.metadata()?;
            Ok((file, found))
        };
        let same = |a: &std::fs::Metadata, b: &std::fs::Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
        // The log itself first: what was rotated before that is in the list, and it is too if it is rotated now.
        let newest = match open(&self.path) {
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => return Err(e),
            newest => newest.ok(),
        };
        let rotated = siblings(&self.path, ".").map_err(|e| e.source)?;
        // Their names end in the time of their rotation, so this is the order of their writing.
        let mut all: Vec<_> = rotated.into_iter().filter(plain).filter_map(|path| open(&path).ok()).collect();
        all.extend(newest.filter(|(_, newest)| !all.iter().any(|(_, found)| same(found, newest))));
        let own = all.iter().position(|(_, found)| same(found, &held));
        let next = match own {
            Some(own) => own + 1,
            // Removed or compressed meanwhile: what was written to since.
            None => {
                let time = |m: &std::fs::Metadata| (m.mtime(), m.mtime_nsec());
                all.iter().position(|(_, found)| time(found) > time(&held)).unwrap_or(all.len().saturating_sub(1))
            }
        };
        let complete = next + 2 < all.len();
        let (file, _) = all.into_iter().nth(next).ok_or(io::ErrorKind::NotFound)?;
        self.file = file;
        self.at = At::Head;
        self.head.clear();
        Ok(complete)
    }

    /// Takes a piece of the file; true when everything asked for is there.
    fn take(&mut self, mut piece: &[u8], out: &mut Vec<u8>) -> bool {
        while !piece.is_empty() {
            let newline = piece.iter().position(|b| *b == b'\n');
            match &mut self.at {
                At::Broken => {
                    let Some(end) = newline else { return false };
                    self.at = At::Head;
                    piece = &piece[end + 1..];
                }
                At::Head => {
                    let line = &piece[..newline.map_or(piece.len(), |end| end + 1)];
                    match head_end(self.head.iter().filter(|b| **b == b' ').count(), line) {
                        Some(end) => {
                            self.head.extend_from_slice(&line[..end]);
                            piece = &piece[end + 1..];
                            if self.begin(out) {
                                return true;
                            }
                        }
                        // A line without content, or one that is none of a runtime's.
                        None if newline.is_some() => {
                            self.head.clear();
                            piece = &piece[line.len()..];
                        }
                        None => {
                            self.head.extend_from_slice(line);
                            piece = &[];
                            if self.head.len() > MAX_HEAD {
                                self.head.clear();
                                self.at = At::Broken;
                            }
                        }
                    }
                }
                At::Content { wanted, partial, length } => {
                    let (content, ends) = match newline {
                        Some(end) if *partial => (&piece[..end], true),
                        Some(end) => (&piece[..=end], true),
                        None => (piece, false),
                    };
                    piece = &piece[newline.map_or(piece.len(), |end| end + 1)..];
                    let (wanted, partial) = (*wanted, *partial);
                    *length += content.len() as u64;
                    let empty = *length == 0;
                    if wanted && self.give(content, out) {
                        return true;
                    }
                    if ends {
                        self.at = At::Head;
                        self.line_start = !partial || empty;
                        if let Some(left) = &mut self.lines_left {
                            *left = left.saturating_sub(1);
                            if *left == 0 {
                                return true;
                            }
                        }
                    }
                }
            }
        }
        false
    }

    /// Begins a line whose head is complete; true when the limit of bytes is reached.
    fn begin(&mut self, out: &mut Vec<u8>) -> bool {
        let head = std::mem::take(&mut self.head);
        let Some(line) = Head::parse(&head) else {
            self.at = At::Broken;
            return false;
        };
        let wanted = self.options.stream.is_none_or(|s| s == line.stream)
            && self.options.since.is_none_or(|since| line.time >= since);
        self.at = At::Content { wanted, partial: line.partial, length: 0 };
        wanted && self.options.timestamps && self.line_start && self.give(stamp(line.text).as_bytes(), out)
    }

    /// Adds output; true when the limit of bytes is reached.
    fn give(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> bool {
        let Some(left) = &mut self.bytes_left else {
            out.extend_from_slice(bytes);
            return false;
        };
        let taken = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
        out.extend_from_slice(&bytes[..taken]);
        *left -= taken as u64;
        *left == 0
    }
}

/// The path that a log's name leads to; None: by a link that leads out of `root`. A name in which there is no link may be anywhere (a runtime's
/// own directory, another podLogsDir before): whoever said it is trusted.
///
/// # Errors
/// Nothing is there, or it cannot be looked at.
pub fn resolve(path: &Path, root: &Path) -> io::Result<Option<PathBuf>> {
    let real = std::fs::canonicalize(path)?;
    let inside = real == path || std::fs::canonicalize(root).is_ok_and(|root| real.starts_with(root));
    Ok(inside.then_some(real))
}

/// Opens a regular file by a path whose links stay below `root`; see [`resolve`].
fn open_file(path: &Path, root: &Path) -> io::Result<File> {
    let out = || io::Error::new(io::ErrorKind::PermissionDenied, "a link leads out of the logs");
    let real = resolve(path, root)?.ok_or_else(out)?;
    // Without a link now: one that was put there since is refused.
    open_held(open_beneath(open_root(Path::new("/"))?, real.strip_prefix("/").unwrap_or(&real))?)
}

/// Where the third space of a head stands, `before` spaces having been seen.
fn head_end(before: usize, line: &[u8]) -> Option<usize> {
    line.iter().enumerate().filter(|(_, b)| **b == b' ').nth(2usize.saturating_sub(before)).map(|(at, _)| at)
}

/// The head of a line.
struct Head<'a> {
    text: &'a str,
    time: Timestamp,
    stream: Stream,
    partial: bool,
}

impl<'a> Head<'a> {
    fn parse(head: &'a [u8]) -> Option<Self> {
        let mut fields = std::str::from_utf8(head).ok()?.split(' ');
        let (text, stream, tags) = (fields.next()?, fields.next()?, fields.next()?);
        let stream = match stream {
            "stdout" => Stream::Stdout,
            "stderr" => Stream::Stderr,
            _ => return None,
        };
        Some(Self { text, time: text.parse().ok()?, stream, partial: tags.split(':').next() == Some("P") })
    }
}

/// A time with nine digits after the point, and the space that sets it off from the line.
fn stamp(text: &str) -> String {
    let zone = text.rfind(['Z', 'z', '+', '-']).unwrap_or(text.len());
    let (clock, zone) = text.split_at(zone);
    let (seconds, fraction) = clock.split_once('.').unwrap_or((clock, ""));
    format!("{seconds}.{fraction:0<9}{zone} ")
}

#[cfg(test)]
#[path = "read_tests.rs"]
mod tests;
