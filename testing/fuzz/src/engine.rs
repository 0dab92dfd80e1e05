//! The engine: inputs out of seeds, in an order that the seed of its randomness gives.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use crate::Target;

/// Longer inputs find little more.
const LONGEST: usize = 4096;
/// Inputs of the run so far that are changed further.
const REMEMBERED: usize = 64;
/// What parsers of text and of frames stumble over.
const PIECES: [&[u8]; 22] = [
    b"\n",
    b" ",
    b"/",
    b"..",
    b"/../",
    b"%2e%2e%2f",
    b"%2F",
    b"%00",
    b"\0",
    b"%",
    b"//",
    b"?",
    b"&",
    b"=",
    b";",
    b"-1",
    b"0",
    b"99999999999999999999",
    b"\xff\xfe",
    "\u{2028}é".as_bytes(),
    b"\x7f\xff\xff\xff",
    b"\x80\0\0\0",
];

/// An input that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The input.
    pub input: Vec<u8>,
    /// What the target said.
    pub what: String,
}

/// Tries inputs until the time is over or `tries` have been made; answers how many, or the first that fails.
///
/// # Errors
/// The failure.
pub fn run(target: &Target, corpus: &[Vec<u8>], seed: u64, time: Duration, tries: u64) -> Result<u64, Failure> {
    let mut random = SmallRng::seed_from_u64(seed);
    let mut pool: Vec<Vec<u8>> = target.seeds.iter().map(|s| s.to_vec()).chain(corpus.iter().cloned()).collect();
    for input in &pool {
        once(target, input)?;
    }
    if pool.is_empty() {
        pool.push(Vec::new());
    }
    let begun = Instant::now();
    let mut recent: VecDeque<Vec<u8>> = VecDeque::new();
    let mut done = 0;
    while done < tries && (done % 64 != 0 || begun.elapsed() < time) {
        let older = match recent.is_empty() || random.random_bool(0.7) {
            true => &pool[random.random_range(0..pool.len())],
            false => &recent[random.random_range(0..recent.len())],
        };
        let mut input = older.clone();
        for _ in 0..random.random_range(1..6) {
            change(&mut input, &pool, &mut random);
        }
        input.truncate(LONGEST);
        once(target, &input)?;
        recent.push_back(input);
        if recent.len() > REMEMBERED {
            recent.pop_front();
        }
        done += 1;
    }
    Ok(done)
}

/// Tries one input.
///
/// # Errors
/// The failure.
pub fn once(target: &Target, input: &[u8]) -> Result<(), Failure> {
    catch_unwind(AssertUnwindSafe(|| (target.run)(input))).map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let what = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned())).unwrap_or_default();
        Failure { input: input.to_vec(), what }
    })
}

/// One change.
fn change(input: &mut Vec<u8>, pool: &[Vec<u8>], random: &mut SmallRng) {
    let mut at = |length: usize| random.random_range(0..=length);
    let here = at(input.len());
    let there = at(input.len()).max(here);
    match random.random_range(0..8) {
        0 if here < input.len() => input[here] ^= 1 << random.random_range(0..8),
        1 if here < input.len() => input[here] = random.random(),
        2 => {
            input.drain(here..there);
        }
        3 => {
            let copy = input[here..there].to_vec();
            input.splice(here..here, copy);
        }
        4 => {
            // Part of another one in its place.
            let other = pool.choose(random).map_or(&[][..], Vec::as_slice);
            let (a, b) = (random.random_range(0..=other.len()), random.random_range(0..=other.len()));
            input.splice(here..there, other[a.min(b)..a.max(b)].iter().copied());
        }
        5 => input.insert(here, random.random()),
        _ => {
            let piece = PIECES.choose(random).copied().unwrap_or_default();
            input.splice(here..here, piece.iter().copied());
        }
    }
}

/// The inputs kept for a target.
///
/// # Errors
/// They are there but cannot be read.
pub fn corpus(root: &Path, target: &str) -> std::io::Result<Vec<Vec<u8>>> {
    let dir = root.join("corpus").join(target);
    let mut files: Vec<PathBuf> = match std::fs::read_dir(&dir) {
        Ok(entries) => entries.map(|e| e.map(|e| e.path())).collect::<Result<_, _>>()?,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        Err(e) => return Err(e),
    };
    files.sort();
    files.iter().map(std::fs::read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finds(target: &Target) -> Result<u64, Failure> {
        run(target, &[], 1, Duration::MAX, 200_000)
    }

    #[test]
    fn finds_what_is_wrong_and_says_with_what() {
        let target = Target {
            name: "x",
            seeds: &[b"abc", b"key=value"],
            run: |bytes| assert!(!bytes.windows(4).any(|w| w == b"/../"), "it is there"),
        };
        let failure = finds(&target).unwrap_err();
        assert!(failure.input.windows(4).any(|w| w == b"/../") && failure.what == "it is there", "{failure:?}");
        assert_eq!(finds(&target).unwrap_err(), failure, "the same seed, the same inputs");
        let fine = Target { run: |bytes| assert!(bytes.len() <= LONGEST), ..target };
        assert_eq!(finds(&fine), Ok(200_000));
        let wrong = Target { run: |bytes| assert!(bytes != b"abc"), ..target };
        assert_eq!(finds(&wrong).unwrap_err().input, b"abc", "seeds are tried as they are");
    }
}
