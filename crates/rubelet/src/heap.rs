//! Memory that bursts leave behind, given back to the system.
//!
//! Rounds of many pods at once, large lists and blocking threads come and go; what they free lies between what stays, and the allocator keeps it. Task: owned by
//! agent.rs, ends with the agent's tasks. It wakes every 30 s, reads one file, and acts only where there is something to be had.

use std::time::Duration;

use host::memory;
use tracing::debug;

/// How often it looks.
const PERIOD: Duration = Duration::from_secs(30);
/// What is not worth it, in bytes.
const LITTLE: usize = 1 << 20;

/// Looks now and then, forever.
pub(crate) async fn give_back_what_bursts_leave() {
    // What was wasted after the last time.
    let mut left = 0;
    loop {
        tokio::time::sleep(PERIOD).await;
        let Some((wasted, in_use)) = wasted() else { return };
        if !worth_it(wasted, left, in_use) {
            continue;
        }
        // The allocator is locked meanwhile, whichever thread does it.
        memory::give_back();
        left = self::wasted().map_or(wasted, |(wasted, _)| wasted);
        debug!(before = wasted, after = left, "Gave free memory back to the system");
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
    use super::worth_it;

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
