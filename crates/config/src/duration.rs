//! Go's duration text, both ways: `1h2m3.5s`, `100ms`, `-1.5h`, `0`.

use std::time::Duration;

use jiff::SignedDuration;

/// The text is not a duration. The wording is that of Go's `time.ParseDuration`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DurationError {
    /// Not a sequence of numbers with units, or out of range (±292 years).
    #[error("time: invalid duration {}", quote(.0))]
    Invalid(String),
    /// A number other than 0 has no unit.
    #[error("time: missing unit in duration {}", quote(.0))]
    MissingUnit(String),
    /// The unit is none of ns, us, µs, ms, s, m, h.
    #[error("time: unknown unit {} in duration {}", quote(.unit), quote(.text))]
    UnknownUnit {
        /// The whole text.
        text: String,
        /// The unit found.
        unit: String,
    },
}

/// Quotes as Go's `%q` does for printable text.
pub(crate) fn quote(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            '\r' => out.push_str("\\r"),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

fn unit_nanos(unit: &str) -> Option<i128> {
    Some(match unit {
        "ns" => 1,
        "us" | "\u{b5}s" | "\u{3bc}s" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        "m" => 60_000_000_000,
        "h" => 3_600_000_000_000,
        _ => return None,
    })
}

/// Reads Go's duration text.
///
/// # Errors
/// As Go's `time.ParseDuration`: no text, no digits, a missing or unknown unit, out of range.
pub fn parse_signed(text: &str) -> Result<SignedDuration, DurationError> {
    let invalid = || DurationError::Invalid(text.to_owned());
    let (negative, mut rest) = match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    if rest == "0" {
        return Ok(SignedDuration::ZERO);
    }
    if rest.is_empty() {
        return Err(invalid());
    }
    let mut total: i128 = 0;
    while !rest.is_empty() {
        let whole_len = rest.bytes().take_while(u8::is_ascii_digit).count();
        let (whole, tail) = rest.split_at(whole_len);
        let (fraction, tail) = match tail.strip_prefix('.') {
            Some(after) => {
                let len = after.bytes().take_while(u8::is_ascii_digit).count();
                after.split_at(len)
            }
            None => ("", tail),
        };
        if whole.is_empty() && fraction.is_empty() {
            return Err(invalid());
        }
        let unit_len = tail.find(|c: char| c == '.' || c.is_ascii_digit()).unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(unit_len);
        if unit.is_empty() {
            return Err(DurationError::MissingUnit(text.to_owned()));
        }
        let nanos = unit_nanos(unit)
            .ok_or_else(|| DurationError::UnknownUnit { text: text.to_owned(), unit: unit.to_owned() })?;
        let whole: i128 = if whole.is_empty() {
            0
        } else if whole.len() > 19 {
            return Err(invalid());
        } else {
            whole.parse().map_err(|_| invalid())?
        };
        total += whole * nanos;
        // Digits beyond 10⁻¹⁷ of an hour are below a nanosecond: they cannot change the result.
        let digits = &fraction[..fraction.len().min(17)];
        if !digits.is_empty() {
            let value: i128 = digits.parse().map_err(|_| invalid())?;
            let scale = 10_i128.pow(u32::try_from(digits.len()).unwrap_or(17));
            total += value * nanos / scale;
        }
        rest = tail;
        if total > i128::from(i64::MAX) + i128::from(negative) {
            return Err(invalid());
        }
    }
    let total = if negative { -total } else { total };
    i64::try_from(total).map(SignedDuration::from_nanos).map_err(|_| invalid())
}

/// Reads Go's duration text, negative ones refused.
///
/// # Errors
/// As [`parse_signed`], and for a negative duration.
pub fn parse(text: &str) -> Result<Duration, DurationError> {
    Duration::try_from(parse_signed(text)?).map_err(|_| DurationError::Invalid(text.to_owned()))
}

/// Writes a duration as Go's `Duration.String` does.
#[must_use]
pub fn format_signed(duration: SignedDuration) -> String {
    let nanos = duration.as_nanos();
    let sign = if nanos < 0 { "-" } else { "" };
    format!("{sign}{}", format_nanos(nanos.unsigned_abs()))
}

/// Writes a duration as Go's `Duration.String` does: `1m0s`, `100ms`, `0s`.
#[must_use]
pub fn format(duration: Duration) -> String {
    format_nanos(duration.as_nanos())
}

fn format_nanos(nanos: u128) -> String {
    const SECOND: u128 = 1_000_000_000;
    if nanos == 0 {
        return "0s".to_owned();
    }
    if nanos < SECOND {
        let (unit, scale) = match nanos {
            0..1_000 => ("ns", 1),
            1_000..1_000_000 => ("\u{b5}s", 1_000),
            _ => ("ms", 1_000_000),
        };
        return format!("{}{unit}", decimal(nanos, scale));
    }
    let minutes = nanos / SECOND / 60;
    let seconds = decimal(nanos % (60 * SECOND), SECOND);
    match (minutes / 60, minutes % 60) {
        (0, 0) => format!("{seconds}s"),
        (0, m) => format!("{m}m{seconds}s"),
        (h, m) => format!("{h}h{m}m{seconds}s"),
    }
}

/// `value / scale` without trailing zeros; `scale` is a power of ten.
fn decimal(value: u128, scale: u128) -> String {
    let (whole, mut rest) = (value / scale, value % scale);
    if rest == 0 {
        return whole.to_string();
    }
    let mut width = scale.ilog10() as usize;
    while rest.is_multiple_of(10) {
        rest /= 10;
        width -= 1;
    }
    format!("{whole}.{rest:0width$}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn go_text() {
        for (text, nanos, back) in [
            ("0", 0, "0s"),
            ("1m0s", 60_000_000_000, "1m0s"),
            ("1h2m3.5s", 3_723_500_000_000, "1h2m3.5s"),
            ("90s", 90_000_000_000, "1m30s"),
            ("1.5h", 5_400_000_000_000, "1h30m0s"),
            ("100ms", 100_000_000, "100ms"),
            ("1us", 1_000, "1\u{b5}s"),
            (".5s", 500_000_000, "500ms"),
            ("5.s", 5_000_000_000, "5s"),
            ("-1s", -1_000_000_000, "-1s"),
            ("1ns", 1, "1ns"),
            ("4h0m0s", 14_400_000_000_000, "4h0m0s"),
            ("1500us", 1_500_000, "1.5ms"),
        ] {
            let parsed = parse_signed(text).unwrap();
            assert_eq!(parsed.as_nanos(), nanos, "{text}");
            assert_eq!(format_signed(parsed), back, "{text}");
        }
    }

    #[test]
    fn go_errors() {
        for (text, message) in [
            ("10", r#"time: missing unit in duration "10""#),
            ("5x", r#"time: unknown unit "x" in duration "5x""#),
            ("1:30", r#"time: unknown unit ":" in duration "1:30""#),
            ("", r#"time: invalid duration """#),
            ("s", r#"time: invalid duration "s""#),
            ("1s ", r#"time: unknown unit "s " in duration "1s ""#),
            ("2562048h", r#"time: invalid duration "2562048h""#),
        ] {
            assert_eq!(parse_signed(text).unwrap_err().to_string(), message);
        }
        assert!(parse("-1s").is_err());
    }

    proptest! {
        #[test]
        fn round_trip(nanos in any::<i64>()) {
            let d = SignedDuration::from_nanos(nanos);
            prop_assert_eq!(parse_signed(&format_signed(d)).unwrap(), d);
        }
    }
}
