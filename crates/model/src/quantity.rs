//! Kubernetes resource quantities: parsing, arithmetic and the canonical text.
//!
//! [`Quantity`] keeps a number the way the Go type `resource.Quantity` does: as a 64-bit mantissa with a decimal exponent while that
//! is enough, else as a longer decimal. The choice between the two is visible from outside (static pod UIDs hash it), and so are
//! the places where Go's results overflow, so both are kept.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt;

use crate::api;

/// How a quantity is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// `12e6`
    DecimalExponent,
    /// `12Mi` (12 × 2²⁰)
    BinarySI,
    /// `12M` (12 × 10⁶)
    DecimalSI,
}

impl Format {
    /// The name of the format in the API machinery.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::DecimalExponent => "DecimalExponent",
            Self::BinarySI => "BinarySI",
            Self::DecimalSI => "DecimalSI",
        }
    }
}

/// The text is not a quantity. The wording is the API machinery's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    /// Not a number followed by a suffix.
    #[error("quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'")]
    Format,
    /// The number is malformed, or has more digits than this type holds (38).
    #[error("unable to parse numeric part of quantity")]
    Numeric,
    /// The suffix is not one of those known.
    #[error("unable to parse quantity's suffix")]
    Suffix,
}

/// The number inside a [`Quantity`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    /// `value` × 10^`scale`.
    Int {
        /// Mantissa.
        value: i64,
        /// Decimal exponent.
        scale: i32,
    },
    /// `unscaled` × 10^-`scale`: numbers that the short form could not take, rounded away from zero to 10⁻⁹.
    Dec {
        /// Mantissa.
        unscaled: i128,
        /// Number of decimals.
        scale: i32,
    },
}

/// An exact amount of a resource.
///
/// Two quantities are equal when their numbers are, however they are written.
#[derive(Clone, Debug)]
pub struct Quantity {
    amount: Amount,
    /// The source text while it is known to be canonical; empty otherwise.
    text: String,
    format: Format,
}

/// 10⁻³, for [`Quantity::scaled_value`] and [`Quantity::round_up`].
pub const MILLI: i32 = -3;
const NANO: i32 = -9;
/// Decimal digits that any i64 can hold.
const INT_DIGITS: i64 = 18;

/// Suffixes with their base and exponent; decimal ones first.
const SUFFIXES: [(&str, u32, i32); 16] = [
    ("", 10, 0),
    ("n", 10, -9),
    ("u", 10, -6),
    ("m", 10, -3),
    ("k", 10, 3),
    ("M", 10, 6),
    ("G", 10, 9),
    ("T", 10, 12),
    ("P", 10, 15),
    ("E", 10, 18),
    ("Ki", 2, 10),
    ("Mi", 2, 20),
    ("Gi", 2, 30),
    ("Ti", 2, 40),
    ("Pi", 2, 50),
    ("Ei", 2, 60),
];

/// A quantity's text taken apart.
struct Parts<'a> {
    negative: bool,
    /// False for texts as `.` or `Ki`, which the short form reads as 0.
    has_digit: bool,
    num: &'a str,
    denom: &'a str,
    suffix: &'a str,
}

fn split(text: &str) -> Result<Parts<'_>, QuantityError> {
    let (negative, rest) = match text.as_bytes().first() {
        None => return Err(QuantityError::Format),
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        Some(_) => (false, text),
    };
    let has_digit = rest.strip_prefix('.').unwrap_or(rest).starts_with(|c: char| c.is_ascii_digit());
    let rest = rest.trim_start_matches('0');
    let digits = |s: &str| s.bytes().take_while(u8::is_ascii_digit).count();
    let (num, rest) = rest.split_at(digits(rest));
    let (denom, suffix) = match rest.strip_prefix('.') {
        Some(rest) => rest.split_at(digits(rest)),
        None => ("", rest),
    };
    // Letters, one sign, digits, and nothing after them.
    let tail = suffix.trim_start_matches(|c| "eEinumkKMGTP".contains(c));
    let tail = tail.strip_prefix(['-', '+']).unwrap_or(tail);
    if !tail.bytes().all(|b| b.is_ascii_digit()) {
        return Err(QuantityError::Format);
    }
    Ok(Parts { negative, has_digit, num: if num.is_empty() { "0" } else { num }, denom, suffix })
}

fn interpret(suffix: &str) -> Result<(u32, i32, Format), QuantityError> {
    if let Some((_, base, exponent)) = SUFFIXES.iter().find(|(s, ..)| *s == suffix) {
        return Ok((*base, *exponent, if *base == 2 { Format::BinarySI } else { Format::DecimalSI }));
    }
    let exponent = suffix.strip_prefix(['e', 'E']).and_then(|e| e.parse::<i64>().ok()).ok_or(QuantityError::Suffix)?;
    // The exponent is a 32-bit number; more wraps around.
    Ok((10, exponent as i32, Format::DecimalExponent))
}

/// 10^`n`, or None when it does not fit.
fn pow10(n: u32) -> Option<i128> {
    10i128.checked_pow(n)
}

/// `unscaled` × 10^-`from` expressed with `to` decimals, rounded away from zero; None when it does not fit.
fn rescale(unscaled: i128, from: i32, to: i32) -> Option<i128> {
    if unscaled == 0 {
        return Some(0);
    }
    let shift = i64::from(to) - i64::from(from);
    if shift >= 0 {
        return unscaled.checked_mul(pow10(u32::try_from(shift).ok()?)?);
    }
    let Some(divisor) = u32::try_from(-shift).ok().and_then(pow10) else {
        return Some(unscaled.signum());
    };
    let rest = unscaled % divisor;
    Some(unscaled / divisor + if rest == 0 { 0 } else { unscaled.signum() })
}

/// Compares `a` × 10^`ae` with `b` × 10^`be`, whatever their sizes.
fn compare(a: i128, ae: i64, b: i128, be: i64) -> Ordering {
    if a.signum() != b.signum() || a == 0 {
        return a.signum().cmp(&b.signum());
    }
    let raised = |m: i128, by: i64| u32::try_from(by).ok().and_then(pow10).and_then(|p| m.checked_mul(p));
    // What overflows is larger in magnitude than anything that does not.
    if ae >= be {
        raised(a, ae - be).map_or(a.signum().cmp(&0), |a| a.cmp(&b))
    } else {
        raised(b, be - ae).map_or(0.cmp(&b.signum()), |b| a.cmp(&b))
    }
}

/// `value` × 10^`by`; None on overflow.
fn raise(value: i64, by: i64) -> Option<i64> {
    if value == 0 {
        return Some(0);
    }
    value.checked_mul(10i64.checked_pow(u32::try_from(by).ok()?)?)
}

/// Takes factors out of `m`; a zero is left alone.
fn strip_factors(mut m: i128, factor: i128) -> (i128, i64) {
    let mut times = 0;
    while m != 0 && m % factor == 0 {
        m /= factor;
        times += 1;
    }
    (m, times)
}

impl Quantity {
    /// Reads a quantity: a signed decimal number and a suffix (`n u m k M G T P E`, `Ki Mi Gi Ti Pi Ei`, or `e`/`E` and an exponent).
    ///
    /// What is finer than 10⁻⁹ is rounded away from zero; a binary quantity above 2⁶³-1 becomes 2⁶³-1.
    ///
    /// # Errors
    /// Says which part of the text is wrong, in the API machinery's words.
    pub fn parse(text: &str) -> Result<Self, QuantityError> {
        if text == "0" {
            return Ok(Self {
                amount: Amount::Int { value: 0, scale: 0 },
                text: text.into(),
                format: Format::DecimalSI,
            });
        }
        let parts = split(text)?;
        let (base, exponent, mut format) = interpret(parts.suffix)?;
        let sign = if parts.negative { -1 } else { 1 };
        if let Some((value, scale, canonical)) = short_form(&parts, exponent, format) {
            let text = if canonical { text.to_string() } else { String::new() };
            return Ok(Self { amount: Amount::Int { value: sign * value, scale }, text, format });
        }
        let (mut unscaled, mut scale) = long_mantissa(&parts)?;
        if base == 10 {
            scale = scale.checked_sub(exponent).ok_or(QuantityError::Numeric)?;
        } else {
            // Beyond an i128 is beyond the largest binary quantity too.
            unscaled = unscaled.saturating_mul(1i128 << exponent);
        }
        if unscaled != 0
            && let Some(nanos) = rescale(unscaled, scale, -NANO)
        {
            (unscaled, scale) = (nanos, -NANO);
        }
        if format == Format::BinarySI {
            if compare(unscaled, -i64::from(scale), i128::from(i64::MAX), 0).is_gt() {
                (unscaled, scale) = (i128::from(i64::MAX), 0);
            }
            if unscaled > 0 && compare(unscaled, -i64::from(scale), 1, 0).is_lt() {
                format = Format::DecimalSI;
            }
        }
        Ok(Self { amount: Amount::Dec { unscaled: i128::from(sign) * unscaled, scale }, text: String::new(), format })
    }

    /// Reads a quantity of the API.
    ///
    /// # Errors
    /// As [`Quantity::parse`].
    pub fn of(quantity: &api::Quantity) -> Result<Self, QuantityError> {
        Self::parse(quantity.0.trim())
    }

    /// `value` units.
    pub fn from_value(value: i64, format: Format) -> Self {
        Self { amount: Amount::Int { value, scale: 0 }, text: String::new(), format }
    }

    /// `value` thousandths.
    pub fn from_milli(value: i64, format: Format) -> Self {
        Self { amount: Amount::Int { value, scale: MILLI }, text: String::new(), format }
    }

    /// The number as it is held.
    pub fn amount(&self) -> Amount {
        self.amount
    }

    /// The source text if it is known to be canonical, else empty. The canonical text is what `Display` gives.
    pub fn source_text(&self) -> &str {
        &self.text
    }

    /// How it is written.
    pub fn format(&self) -> Format {
        self.format
    }

    /// The API's form, canonical.
    pub fn to_api(&self) -> api::Quantity {
        api::Quantity(self.to_string())
    }

    /// Mantissa and decimal exponent.
    fn decimal(&self) -> (i128, i64) {
        match self.amount {
            Amount::Int { value, scale } => (i128::from(value), i64::from(scale)),
            Amount::Dec { unscaled, scale } => (unscaled, -i64::from(scale)),
        }
    }

    /// True for zero.
    pub fn is_zero(&self) -> bool {
        self.decimal().0 == 0
    }

    /// -1, 0 or 1.
    pub fn sign(&self) -> i32 {
        self.decimal().0.signum() as i32
    }

    /// Whole units, rounded up.
    pub fn value(&self) -> i64 {
        self.scaled_value(0)
    }

    /// Thousandths, rounded up.
    pub fn milli_value(&self) -> i64 {
        self.scaled_value(MILLI)
    }

    /// The number of 10^`scale`, rounded up. What does not fit comes out as in Go: as 0 or as the low 64 bits.
    pub fn scaled_value(&self, scale: i32) -> i64 {
        match self.amount {
            Amount::Int { value, scale: own } if own < scale => {
                rescale(i128::from(value), -own, -scale).map_or(0, |v| v as i64)
            }
            Amount::Int { value, scale: own } => {
                let by = i64::from(own) - i64::from(scale);
                // The steps that Go multiplies by at once keep the low bits.
                let wrapped =
                    if matches!(by, 1 | 2 | 3 | 6 | 9) { value.wrapping_mul(10i64.pow(by as u32)) } else { 0 };
                raise(value, by).unwrap_or(wrapped)
            }
            Amount::Dec { unscaled, scale: own } => {
                let shift = i64::from(own) + i64::from(scale);
                if shift <= 0 {
                    return (unscaled as i64).wrapping_mul(raise(1, -shift).unwrap_or(i64::MIN));
                }
                let Some(divisor) = u32::try_from(shift).ok().and_then(pow10) else {
                    return i64::from(unscaled > 0);
                };
                let up = |rest: i128| i64::from(rest != 0);
                if unscaled < i128::from(i64::MAX) && shift < 19 {
                    let low = i128::from(unscaled as i64);
                    return (low / divisor) as i64 + up(low % divisor);
                }
                (unscaled.div_euclid(divisor) as i64).wrapping_add(up(unscaled.rem_euclid(divisor)))
            }
        }
    }

    /// Rounds away from zero to a multiple of 10^`scale`; true when nothing was lost.
    pub fn round_up(&mut self, scale: i32) -> bool {
        let before = self.clone();
        match self.amount {
            Amount::Int { scale: own, .. } if own >= scale => return true,
            Amount::Int { value, scale: own } => {
                let value = rescale(i128::from(value), -own, -scale).map_or(value, |v| v as i64);
                self.amount = Amount::Int { value, scale };
            }
            Amount::Dec { unscaled, scale: own } => {
                if let Some(unscaled) = rescale(unscaled, own, -scale) {
                    self.amount = Amount::Dec { unscaled, scale: -scale };
                }
            }
        }
        self.text.clear();
        *self == before
    }

    /// Adds `other`. A zero takes over the other's format. A sum beyond 38 digits stays at the largest number.
    pub fn add(&mut self, other: &Self) {
        self.text.clear();
        if self.is_zero() {
            self.format = other.format;
        }
        if let (Amount::Int { value: a, scale: ae }, Amount::Int { value: b, scale: be }) = (self.amount, other.amount)
            && let Some(sum) = add_short((a, ae), (b, be))
        {
            self.amount = sum;
            return;
        }
        self.amount = add_long(self.amount, other.amount);
    }

    /// Subtracts `other`. A zero takes over the other's format.
    pub fn sub(&mut self, other: &Self) {
        let mut negative = other.clone();
        negative.neg();
        self.add(&negative);
    }

    /// Turns the sign round.
    pub fn neg(&mut self) {
        self.text.clear();
        self.amount = match self.amount {
            Amount::Int { value, scale } => Amount::Int { value: value.wrapping_neg(), scale },
            Amount::Dec { unscaled, scale } => Amount::Dec { unscaled: unscaled.wrapping_neg(), scale },
        };
    }

    /// Multiplies by `factor`. A product beyond 38 digits stays at the largest number.
    pub fn mul(&mut self, factor: i64) {
        self.text.clear();
        self.amount = match self.amount {
            Amount::Int { value, scale } => match value.checked_mul(factor) {
                Some(value) => Amount::Int { value, scale },
                None => Amount::Dec { unscaled: i128::from(value) * i128::from(factor), scale: -scale },
            },
            Amount::Dec { unscaled, scale } => {
                Amount::Dec { unscaled: unscaled.saturating_mul(i128::from(factor)), scale }
            }
        };
    }
}

/// Mantissa, exponent and whether the text is canonical, for what fits the short form.
fn short_form(parts: &Parts<'_>, exponent: i32, format: Format) -> Option<(i64, i32, bool)> {
    let digits = (parts.num.len() + parts.denom.len()) as i64;
    if format == Format::BinarySI {
        // 2^exponent has about exponent × 0.3 digits.
        let room = 15 - parts.num.len() as i64 - i64::from(exponent) * 3 / 10 - 1;
        if !parts.denom.is_empty() || room < 0 {
            return None;
        }
        let value: i64 = parts.num.parse().ok()?;
        return Some((value.checked_mul(1i64.checked_shl(exponent.unsigned_abs())?)?, 0, value & 7 != 0));
    }
    let scale = i64::from(exponent) - parts.denom.len() as i64;
    if digits > INT_DIGITS || scale < i64::from(NANO) {
        return None;
    }
    let shifted = [parts.num, parts.denom].concat();
    let canonical = scale % 3 == 0 && !shifted.ends_with("000") && !shifted.starts_with('0');
    Some((shifted.parse().ok()?, i32::try_from(scale).ok()?, canonical))
}

/// All digits as one number and how many of them are decimals. Decimals beyond the 18th are folded into one that keeps "not zero".
fn long_mantissa(parts: &Parts<'_>) -> Result<(i128, i32), QuantityError> {
    const KEPT: usize = 18;
    if !parts.has_digit {
        return Err(QuantityError::Numeric);
    }
    let (denom, sticky) = match parts.denom.split_at_checked(KEPT) {
        Some((kept, rest)) => (kept, if rest.bytes().any(|b| b != b'0') { "1" } else { "" }),
        None => (parts.denom, ""),
    };
    let digits = [parts.num, denom, sticky].concat();
    Ok((digits.parse().map_err(|_| QuantityError::Numeric)?, (denom.len() + sticky.len()) as i32))
}

fn add_short((a, ae): (i64, i32), (b, be): (i64, i32)) -> Option<Amount> {
    let (value, scale) = match () {
        () if b == 0 => (a, ae),
        () if a == 0 => (b, be),
        () if ae >= be => (raise(a, i64::from(ae) - i64::from(be))?.checked_add(b)?, be),
        () => (raise(b, i64::from(be) - i64::from(ae))?.checked_add(a)?, ae),
    };
    Some(Amount::Int { value, scale })
}

fn add_long(a: Amount, b: Amount) -> Amount {
    let dec = |x: Amount| match x {
        Amount::Int { value, scale } => (i128::from(value), -scale),
        Amount::Dec { unscaled, scale } => (unscaled, scale),
    };
    let ((a, a_scale), (b, b_scale)) = (dec(a), dec(b));
    let scale = a_scale.max(b_scale);
    let at = |m: i128, from: i32| rescale(m, from, scale).unwrap_or(if m < 0 { i128::MIN } else { i128::MAX });
    Amount::Dec { unscaled: at(a, a_scale).saturating_add(at(b, b_scale)), scale }
}

impl PartialEq for Quantity {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Quantity {}

impl PartialOrd for Quantity {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Quantity {
    fn cmp(&self, other: &Self) -> Ordering {
        let ((a, ae), (b, be)) = (self.decimal(), other.decimal());
        compare(a, ae, b, be)
    }
}

/// The canonical text: no fraction, no precision lost, the largest suffix that allows both.
impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.text.is_empty() {
            return f.write_str(&self.text);
        }
        let (mantissa, exponent) = self.decimal();
        if mantissa == 0 {
            return f.write_str("0");
        }
        let suffix = |base: u32, exponent: i64| {
            // An exponent beyond the last suffix is written without one, as Go does.
            SUFFIXES.iter().find(|(_, b, e)| *b == base && i64::from(*e) == exponent).map_or("", |(s, ..)| s)
        };
        let whole = compare(mantissa.saturating_abs(), exponent, 1024, 0).is_ge();
        if self.format == Format::BinarySI
            && whole
            && let Some(units) = whole_units(mantissa, exponent)
        {
            let (number, times) = strip_factors(units, 1024);
            return write!(f, "{number}{}", if times == 0 { "" } else { suffix(2, times * 10) });
        }
        let (number, times) = strip_factors(mantissa, 10);
        let exponent = exponent + times;
        let zeros = exponent.rem_euclid(3);
        let exponent = exponent - zeros;
        let number = format!("{number}{}", &"00"[..zeros as usize]);

        if self.format == Format::DecimalExponent {
            return if exponent == 0 { write!(f, "{number}") } else { write!(f, "{number}e{exponent}") };
        }
        write!(f, "{number}{}", suffix(10, exponent))
    }
}

/// `mantissa` × 10^`exponent` when that is a whole number that fits.
fn whole_units(mantissa: i128, exponent: i64) -> Option<i128> {
    let power = pow10(u32::try_from(exponent.unsigned_abs()).ok()?)?;
    if exponent >= 0 {
        return mantissa.checked_mul(power);
    }
    (mantissa % power == 0).then_some(mantissa / power)
}

/// `list["cpu"]` in thousandths of a CPU, rounded up. None when absent or not a quantity.
pub fn cpu_milli(list: &BTreeMap<String, api::Quantity>) -> Option<i64> {
    Some(Quantity::of(list.get("cpu")?).ok()?.milli_value())
}

/// `list[name]` in whole units (bytes for memory, storage and huge pages), rounded up. None when absent or not a quantity.
pub fn bytes(list: &BTreeMap<String, api::Quantity>, name: &str) -> Option<i64> {
    Some(Quantity::of(list.get(name)?).ok()?.value())
}

#[cfg(test)]
#[path = "quantity_tests.rs"]
mod quantity_tests;
