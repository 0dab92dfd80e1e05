//! CPU time in the kernel's terms: shares, CFS quota and cgroup v2 weight.

/// Least CPU shares, also what no request gives.
pub const MIN_SHARES: u64 = 2;
/// Most CPU shares.
pub const MAX_SHARES: u64 = 262_144;
/// CFS period in µs unless configured otherwise.
pub const DEFAULT_PERIOD: i64 = 100_000;
/// Least CFS quota in µs that the kernel takes.
const MIN_QUOTA: i64 = 1_000;

/// Shares of a request in thousandths of a CPU: 1024 a CPU.
pub fn shares(milli: i64) -> u64 {
    u64::try_from(milli.saturating_mul(1024) / 1000).unwrap_or(0).clamp(MIN_SHARES, MAX_SHARES)
}

/// Thousandths of a CPU of shares, rounded up; 0 below the least shares.
pub fn milli_of_shares(shares: i64) -> i64 {
    if shares < MIN_SHARES as i64 { 0 } else { shares.saturating_mul(1000).saturating_add(1023) / 1024 }
}

/// CFS quota of a limit in thousandths of a CPU, in µs a `period`; 0 (none) without limit.
pub fn quota(milli: i64, period: i64) -> i64 {
    if milli == 0 { 0 } else { (milli.saturating_mul(period) / 1000).max(MIN_QUOTA) }
}

/// Thousandths of a CPU of a quota; 0 for no quota.
pub fn milli_of_quota(quota: i64, period: i64) -> i64 {
    if quota == -1 || period == 0 { 0 } else { quota.saturating_mul(1000) / period }
}

/// cgroup v2 weight of shares, for cgroups that the kubelet itself writes. Runtimes convert container shares with a newer formula.
pub fn weight(shares: u64) -> u64 {
    1 + shares.clamp(MIN_SHARES, MAX_SHARES).saturating_sub(MIN_SHARES) * 9_999 / 262_142
}

/// Shares of a cgroup v2 weight that [`weight`] wrote.
pub fn shares_of_weight(weight: u64) -> u64 {
    weight.saturating_sub(1).saturating_mul(262_142) / 9_999 + MIN_SHARES
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn vectors() {
        for (milli, want_shares, want_weight) in [
            (0, 2, 1),
            (1, 2, 1),
            (10, 10, 1),
            (100, 102, 4),
            (500, 512, 20),
            (1000, 1024, 39),
            (4000, 4096, 157),
            (i64::MAX, 262_144, 10_000),
        ] {
            assert_eq!((shares(milli), weight(shares(milli))), (want_shares, want_weight), "{milli}m");
        }
        for (milli, want) in [(0, 0), (1, 1_000), (5, 1_000), (10, 1_000), (11, 1_100), (500, 50_000), (2000, 200_000)]
        {
            assert_eq!(quota(milli, DEFAULT_PERIOD), want, "{milli}m");
        }
        assert_eq!(quota(500, 5_000), 2_500);
        for (s, want) in [(0, 0), (1, 0), (2, 2), (10, 10), (102, 100), (512, 500), (1024, 1000), (262_144, 256_000)] {
            assert_eq!(milli_of_shares(s), want, "{s} shares");
        }
        assert_eq!((milli_of_quota(-1, 100_000), milli_of_quota(50_000, 100_000)), (0, 500));
        for (w, want) in [(1, 2), (39, 998), (157, 4_091), (10_000, 262_144)] {
            assert_eq!(shares_of_weight(w), want, "weight {w}");
        }
    }

    proptest! {
        /// More CPU never gives less of anything, and everything stays within what the kernel takes.
        #[test]
        fn monotonic(a in 0..i64::MAX, b in 0..i64::MAX, period in 1_000..1_000_000i64) {
            let (a, b) = (a.min(b), a.max(b));
            prop_assert!(shares(a) <= shares(b));
            prop_assert!(weight(shares(a)) <= weight(shares(b)));
            prop_assert!(quota(a, period) <= quota(b, period));
            prop_assert!((MIN_SHARES..=MAX_SHARES).contains(&shares(b)));
            prop_assert!((1..=10_000).contains(&weight(shares(b))));
            prop_assert!(quota(a, period) == 0 || quota(a, period) >= 1_000);
        }

        /// Going to shares and back gives the request again, up to the precision of a share.
        #[test]
        fn shares_round_trip(milli in 2..256_000i64) {
            let back = milli_of_shares(shares(milli) as i64);
            prop_assert!((milli - 1..=milli).contains(&back), "{milli} -> {back}");
        }
    }
}
