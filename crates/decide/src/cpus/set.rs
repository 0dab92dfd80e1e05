//! Sets of CPUs in the kernel's list form (`0-3,8`).

use std::collections::BTreeSet;
use std::fmt;

/// A set of logical CPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct CpuSet(BTreeSet<u32>);

/// A text is not a list of CPUs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a list of CPUs")]
pub struct NotCpus(pub String);

/// The highest number that is taken for a CPU: a list may come from a file that was tampered with.
const MAX: u32 = 1 << 16;

impl CpuSet {
    /// Reads the list form; blank is the empty set.
    ///
    /// # Errors
    /// The text is none.
    pub fn parse(text: &str) -> Result<Self, NotCpus> {
        let wrong = || NotCpus(text.to_owned());
        let number = |s: &str| s.trim().parse::<u32>().ok().filter(|n| *n <= MAX).ok_or_else(wrong);
        let mut set = BTreeSet::new();
        for part in text.trim().split(',').filter(|p| !text.trim().is_empty() || !p.is_empty()) {
            match part.split_once('-') {
                None => {
                    set.insert(number(part)?);
                }
                Some((from, to)) => {
                    let (from, to) = (number(from)?, number(to)?);
                    if from > to {
                        return Err(wrong());
                    }
                    set.extend(from..=to);
                }
            }
        }
        Ok(Self(set))
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// None.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// True when this CPU is in it.
    pub fn has(&self, cpu: u32) -> bool {
        self.0.contains(&cpu)
    }

    /// The CPUs, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().copied()
    }

    /// In either.
    #[must_use]
    pub fn or(&self, other: &Self) -> Self {
        Self(self.0.union(&other.0).copied().collect())
    }

    /// In both.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        Self(self.0.intersection(&other.0).copied().collect())
    }

    /// In this one alone.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        Self(self.0.difference(&other.0).copied().collect())
    }

    /// True when all of these are in the other.
    pub fn is_subset(&self, other: &Self) -> bool {
        self.0.is_subset(&other.0)
    }
}

impl FromIterator<u32> for CpuSet {
    fn from_iter<I: IntoIterator<Item = u32>>(cpus: I) -> Self {
        Self(cpus.into_iter().collect())
    }
}

impl Extend<u32> for CpuSet {
    fn extend<I: IntoIterator<Item = u32>>(&mut self, cpus: I) {
        self.0.extend(cpus);
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0.iter().copied().peekable();
        let mut first = true;
        while let Some(from) = rest.next() {
            let mut to = from;
            while rest.peek() == Some(&(to + 1)) {
                to += 1;
                rest.next();
            }
            if !std::mem::replace(&mut first, false) {
                f.write_str(",")?;
            }
            if from == to { write!(f, "{from}")? } else { write!(f, "{from}-{to}")? }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists() {
        for (text, want) in
            [("0-3,8", "0-3,8"), ("", ""), ("5", "5"), ("3,1,2", "1-3"), ("0-1,4-5\n", "0-1,4-5"), ("0-1", "0-1")]
        {
            assert_eq!(CpuSet::parse(text).unwrap().to_string(), want, "{text}");
        }
        for text in ["x", "1-", "3-1", "1,,2", "-1", "0-4294967295"] {
            assert_eq!(CpuSet::parse(text), Err(NotCpus(text.into())));
        }
    }
}
