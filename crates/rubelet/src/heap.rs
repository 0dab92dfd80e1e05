//! Memory that bursts leave behind, given back to the system.
//!
//! Rounds of many pods at once, large lists and blocking threads come and go; what they free lies between what stays, and the allocator keeps it. And code that
//! ran once, at the start above all, stays mapped. Task: owned by agent.rs, ends with the agent's tasks. It wakes every 30 s, reads one file,
//! and acts only where there is something to be had.

use std::time::Duration;

use host::memory;
use tracing::debug;

/// How often it looks.
const PERIOD: Duration = Duration::from_secs(30);
/// What is not worth it, in bytes.
const LITTLE: usize = 1 << 20;
/// How much more code and constants of the program must be mapped than were in use a period after the last time, in bytes.
const MUCH_CODE: usize = 3 << 20;

/// Looks now and then, forever.
pub(crate) async fn give_back_what_bursts_leave() {
    // What was wasted after the last time.
    let mut left = 0;
    let mut code = Code::default();
    loop {
        tokio::time::sleep(PERIOD).await;
        let Some((wasted, in_use)) = wasted() else { return };
        if memory::resident_files().is_some_and(|mapped| code.is_too_much(mapped)) {
            memory::let_go_of_code();
        }
        if !worth_it(wasted, left, in_use) {
            continue;
        }
        // The allocator is locked meanwhile, whichever thread does it.
        memory::give_back();
        left = self::wasted().map_or(wasted, |(wasted, _)| wasted);
        debug!(before = wasted, after = left, "Gave free memory back to the system");
    }
}

/// How much code is in use.
#[derive(Debug, Default)]
struct Code {
    /// What was mapped a period after the last time that it was let go of; None until that is known.
    in_use: Option<usize>,
    begun: bool,
}

impl Code {
    /// Whether more is mapped than what is in use by much: then it is to be let go of. The first time it always is: what ran at the start is not
    /// needed again.
    fn is_too_much(&mut self, mapped: usize) -> bool {
        match (self.begun, self.in_use) {
            (false, _) => {}
            (true, None) => {
                self.in_use = Some(mapped);
                return false;
            }
            (true, Some(in_use)) if mapped <= in_use + MUCH_CODE => return false,
            (true, Some(_)) => {}
        }
        (self.begun, self.in_use) = (true, None);
        true
    }
}

/// What is resident and not in use, and what is in use; in bytes.
fn wasted() -> Option<(usize, usize)> {
    let held = memory::allocator()?;
    let in_use = held.in_use + held.mapped;
    Some((memory::resident()?.saturating_sub(in_use), in_use))
}

/// Whether much is wasted, and more than what could not be given back the last time: holes smaller than a page, stacks.
fn worth_it(wasted: usize, left: usize, in_use: usize) -> bool {
    wasted > left + LITTLE && wasted > LITTLE + in_use / 8
}

#[cfg(test)]
mod tests {
    use super::{Code, worth_it};

    #[test]
    fn code_is_let_go_of_seldom() {
        let mib = 1 << 20;
        let mut code = Code::default();
        let let_go: Vec<bool> = [9, 4, 5, 6, 7, 6, 8, 5, 6, 8, 9].map(|n| code.is_too_much(n * mib)).into();
        // After the start; and when 8 are mapped where 4 were in use; from then on 5 are.
        let expected = [0, 6, 10];
        assert_eq!(
            let_go.iter().enumerate().filter(|(_, done)| **done).map(|(at, _)| at).collect::<Vec<_>>(),
            expected
        );
    }

    #[test]
    fn when_it_is_worth_it() {
        let mib = 1 << 20;
        assert!(worth_it(40 * mib, 0, 60 * mib));
        // Next to nothing came since: holes.
        assert!(!worth_it(21 * mib, 20 * mib, 60 * mib));
        assert!(worth_it(30 * mib, 20 * mib, 60 * mib));
        // It is in use.
        assert!(!worth_it(5 * mib, 0, 60 * mib));
    }
}
