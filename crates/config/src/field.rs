//! How a field is read from a value tree and written back, and the macros that make structs and enums of such fields.
//!
//! The tables in [`crate::types`] and [`crate::nested`] say for each field its JSON name, its default and one of:
//! - `zero`: a zero value means "not set" and is left out when written (a plain Go field with `omitempty`);
//! - `always`: the same, but always written (durations and structs);
//! - `ptr`: any value given counts, always written (a Go pointer with a default);
//! - `opt`: any value given counts, left out when empty or none (a Go pointer without a default, lists, maps).

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::SignedDuration;
use model::api::{Taint, Time};
use model::quantity::Quantity;
use serde_json::{Map, Value};

use crate::duration;
use crate::problem::Problem;
use crate::tree::join;

/// A type that a configuration field can have.
pub(crate) trait Field: Sized {
    /// Reads a value that is not null; what is wrong goes to `out`.
    fn read(value: &Value, at: &str, out: &mut Vec<Problem>) -> Option<Self>;
    /// The value as JSON.
    fn write(&self) -> Value;
    /// Go's zero value.
    fn is_zero(&self) -> bool;
    /// Sets the part of this field that `path` names; used for flags, where zero values count.
    fn set(&mut self, path: &[&str], value: &Value, at: &str, out: &mut Vec<Problem>) {
        debug_assert!(path.is_empty(), "no field below {at}: {path:?}");
        if let Some(read) = Self::read(value, at, out) {
            *self = read;
        }
    }
}

/// A value as it is shown in a message.
pub(crate) fn show(value: &Value) -> String {
    let kind = match value {
        Value::Null => return "null".to_owned(),
        Value::Bool(b) => return format!("{b} (a boolean)"),
        Value::Number(n) => return n.to_string(),
        Value::String(s) => return format!("{} (a string)", duration::quote(s)),
        Value::Array(_) => "a list",
        Value::Object(_) => "a mapping",
    };
    kind.to_owned()
}

fn wrong(value: &Value, at: &str, expected: &str, out: &mut Vec<Problem>) {
    out.push(Problem::error(at, format!("cannot use {}: {expected} is needed", show(value))));
}

impl Field for bool {
    fn read(value: &Value, at: &str, out: &mut Vec<Problem>) -> Option<Self> {
        if value.as_bool().is_none() {
            wrong(value, at, "true or false", out);
        }
        value.as_bool()
    }
    fn write(&self) -> Value {
        (*self).into()
    }
    fn is_zero(&self) -> bool {
        !*self
    }
}

/// A whole number, also one written as `1.0` or `1e2`.
fn whole(value: &Value) -> Option<i128> {
    let number = value.as_number()?;
    if let Some(i) = number.as_i64() {
        return Some(i.into());
    }
    if let Some(u) = number.as_u64() {
        return Some(u.into());
    }
    let float = number.as_f64()?;
    // Above 2⁵³ a float no longer says which whole number was meant.
    #[allow(clippy::cast_possible_truncation)]
    (float.fract() == 0.0 && float.abs() <= 9_007_199_254_740_992.0).then_some(float as i128)
}

macro_rules! integer_field {
    ($($ty:ty),*) => {$(
        impl Field for $ty {
            fn read(value: &Value, at: &str, out: &mut Vec<Problem>) -> Option<Self> {
                let number = whole(value).and_then(|n| <$ty>::try_from(n).ok());
                if number.is_none() {
                    let expected = format!("a whole number from {} to {}", <$ty>::MIN, <$ty>::MAX);
                    wrong(value, at, &expected, out);
                }
                number
            }
            fn write(&self) -> Value {
                (*self).into()
            }
            fn is_zero(&self) -> bool {
                *self == 0
            }
        }
    )*};
}
integer_field!(i32, i64, u32);

impl Field for f64 {
    fn read(value: &Value, at: &str, out: &mut Vec<Problem>) -> Option<Self> {
        if !value.is_number() {
            wrong(value, at, "a number", out);
        }
        value.as_f64()
    }
    fn write(&self) -> Value {
        (*self).into()
    }
    fn is_zero(&self) -> bool {
        *self == 0.0
    }
}

impl Field for String {
    fn read(value: &Value, at: &str, out: &mut Vec<Problem>) -> Option<Self> {
        if !value.is_string() {
            wrong(value, at, "a string (quote it)", out);
        }
        value.as_str().map(str::to_owned)
    }
    fn write(&self) -> Value {
        self.as_str().into()
    }
    fn is_zero(&self) -> bool {
        self.is_empty()
    }
}

fn read_duration(value: &Value, at: &str, out: &mut Vec<Problem>) -> Option<SignedDuration> {
    let Some(text) = value.as_str() else {
        wrong(value, at, "a duration such as \"1m30s\"", out);
        return None;
    };
    match duration::parse_signed(text) {
        Ok(parsed) => Some(parsed),
        Err(e) => {
            let units = "a duration is a number with a unit: ns, us, ms, s, m, h, as in \"1m30s\"";
            out.push(Problem::error(at, format!("{e}; {units}")));
            None
        }
    }
}

impl Field for SignedDuration {
    fn read(value: &Value, at: &str, out: &mut Vec<Problem>) -> Option<Self> {
        read_duration(value, at, out)
    }
    fn write(&self) -> Value {
        duration::format_signed(*self).into()
    }
    fn is_zero(&self) -> bool {
        SignedDuration::is_zero(self)
    }
}

impl Field for Duration {
    fn read(value: &Value, at: &str, out: &mut Vec<Problem>) -> Option<Self> {
        let signed = read_duration(value, at, out)?;
        let unsigned = Duration::try_from(signed).ok();
        if unsigned.is_none() {
            let shown = duration::format_signed(signed);
            out.push(Problem::error(at, format!("invalid configuration: {at} {shown} must not be negative")));
        }
        unsigned
    }
    fn write(&self) -> Value {
        duration::format(*self).into()
    }
    fn is_zero(&self) -> bool {
        Duration::is_zero(self)
    }
}

impl Field for Quantity {
    fn read(value: &Value, at: &str, out: &mut Vec<Problem>) -> Option<Self> {
        let text = match value {
            Value::String(text) => text.clone(),
            Value::Number(number) => number.to_string(),
            _ => {
                wrong(value, at, "a quantity such as \"10Mi\"", out);
                return None;
            }
        };
        Quantity::parse(&text)
            .map_err(|e| out.push(Problem::error(at, format!("{}: {e}", duration::quote(&text)))))
            .ok()
    }
    fn write(&self) -> Value {
        self.to_string().into()
    }
    fn is_zero(&self) -> bool {
        Quantity::is_zero(self)
    }
}

impl<T: Field> Field for Option<T> {
    fn read(value: &Value, at: &str, out: &mut Vec<Problem>) -> Option<Self> {
        T::read(value, at, out).map(Some)
    }
    fn write(&self) -> Value {
        self.as_ref().map_or(Value::Null, T::write)
    }
    fn is_zero(&self) -> bool {
        self.is_none()
    }
}

impl<T: Field> Field for Vec<T> {
    fn read(value: &Value, at: &str, out: &mut Vec<Problem>) -> Option<Self> {
        let Some(items) = value.as_array() else {
            wrong(value, at, "a list", out);
            return None;
        };
        let before = out.len();
        let read = items.iter().enumerate().filter_map(|(i, item)| T::read(item, &format!("{at}[{i}]"), out)).collect();
        (out[before..].iter().all(is_warning)).then_some(read)
    }
    fn write(&self) -> Value {
        self.iter().map(T::write).collect()
    }
    fn is_zero(&self) -> bool {
        self.is_empty()
    }
}

impl<T: Field> Field for BTreeMap<String, T> {
    fn read(value: &Value, at: &str, out: &mut Vec<Problem>) -> Option<Self> {
        let Some(map) = value.as_object() else {
            wrong(value, at, "a mapping", out);
            return None;
        };
        let before = out.len();
        let read =
            map.iter().filter_map(|(key, item)| Some((key.clone(), T::read(item, &join(at, key), out)?))).collect();
        (out[before..].iter().all(is_warning)).then_some(read)
    }
    fn write(&self) -> Value {
        Value::Object(self.iter().map(|(k, v)| (k.clone(), v.write())).collect())
    }
    fn is_zero(&self) -> bool {
        self.is_empty()
    }
}

fn is_warning(problem: &Problem) -> bool {
    problem.severity < model::report::Severity::Error
}

impl Field for Taint {
    fn read(value: &Value, at: &str, out: &mut Vec<Problem>) -> Option<Self> {
        let Some(map) = value.as_object() else {
            wrong(value, at, "a mapping with key, value and effect", out);
            return None;
        };
        let mut taint = Taint::default();
        for (key, item) in map.iter().filter(|(_, item)| !item.is_null()) {
            let here = join(at, key);
            match key.as_str() {
                "key" => taint.key = String::read(item, &here, out)?,
                "value" => taint.value = Some(String::read(item, &here, out)?),
                "effect" => taint.effect = String::read(item, &here, out)?,
                "timeAdded" => {
                    let text = String::read(item, &here, out)?;
                    match text.parse() {
                        Ok(time) => taint.time_added = Some(Time(time)),
                        Err(_) => {
                            let message = format!("parsing time {} as RFC 3339", duration::quote(&text));
                            out.push(Problem::error(here, message));
                            return None;
                        }
                    }
                }
                _ => unknown(&here, out),
            }
        }
        Some(taint)
    }
    fn write(&self) -> Value {
        let mut map = Map::new();
        map.insert("key".to_owned(), self.key.as_str().into());
        if let Some(value) = self.value.as_deref().filter(|v| !v.is_empty()) {
            map.insert("value".to_owned(), value.into());
        }
        map.insert("effect".to_owned(), self.effect.as_str().into());
        if let Some(time) = &self.time_added {
            map.insert("timeAdded".to_owned(), time.0.to_string().into());
        }
        Value::Object(map)
    }
    fn is_zero(&self) -> bool {
        false
    }
}

/// Reports a field that this version of the API does not have.
pub(crate) fn unknown(at: &str, out: &mut Vec<Problem>) {
    out.push(Problem::warning(at, format!("unknown field {}: it is ignored", duration::quote(at))));
}

/// The mapping behind a struct.
pub(crate) fn mapping<'v>(value: &'v Value, at: &str, out: &mut Vec<Problem>) -> Option<&'v Map<String, Value>> {
    let map = value.as_object();
    if map.is_none() {
        wrong(value, at, "a mapping", out);
    }
    map
}

/// A struct of the configuration API; see the module for `zero`, `always`, `ptr` and `opt`.
macro_rules! config_struct {
    (
        $(#[$meta:meta])*
        pub struct $name:ident {
            $( $(#[$fmeta:meta])* $field:ident : $ty:ty = $kind:ident $json:literal $($default:expr)? ; )*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq)]
        pub struct $name {
            $( $(#[$fmeta])* pub $field: $ty, )*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $( $field: crate::field::config_struct!(@default $ty $(, $default)?), )* }
            }
        }

        impl crate::field::Field for $name {
            fn read(
                value: &serde_json::Value,
                at: &str,
                out: &mut Vec<crate::problem::Problem>,
            ) -> Option<Self> {
                let map = crate::field::mapping(value, at, out)?;
                let mut read = Self::default();
                for (key, value) in map {
                    let here = crate::tree::join(at, key);
                    match key.as_str() {
                        $( $json => if !value.is_null() {
                            let got: Option<$ty> = crate::field::Field::read(value, &here, out);
                            if let Some(got) = got.filter(|got| crate::field::config_struct!(@counts $kind, got)) {
                                read.$field = got;
                            }
                        }, )*
                        _ => crate::field::unknown(&here, out),
                    }
                }
                Some(read)
            }

            fn write(&self) -> serde_json::Value {
                let mut map = serde_json::Map::new();
                $( if crate::field::config_struct!(@writes $kind, &self.$field) {
                    map.insert($json.to_owned(), crate::field::Field::write(&self.$field));
                } )*
                serde_json::Value::Object(map)
            }

            fn is_zero(&self) -> bool {
                false
            }

            fn set(
                &mut self,
                path: &[&str],
                value: &serde_json::Value,
                at: &str,
                out: &mut Vec<crate::problem::Problem>,
            ) {
                let Some((first, rest)) = path.split_first() else {
                    if let Some(read) = <Self as crate::field::Field>::read(value, at, out) {
                        *self = read;
                    }
                    return;
                };
                match *first {
                    $( $json => crate::field::Field::set(&mut self.$field, rest, value, at, out), )*
                    _ => debug_assert!(false, "no such field: {first}"),
                }
            }
        }
    };
    (@default $ty:ty, $default:expr) => { $default };
    (@default $ty:ty) => { <$ty>::default() };
    (@counts zero, $v:expr) => { !crate::field::Field::is_zero($v) };
    (@counts always, $v:expr) => { !crate::field::Field::is_zero($v) };
    (@counts ptr, $v:expr) => { { let _ = $v; true } };
    (@counts opt, $v:expr) => { { let _ = $v; true } };
    (@writes zero, $v:expr) => { !crate::field::Field::is_zero($v) };
    (@writes opt, $v:expr) => { !crate::field::Field::is_zero($v) };
    (@writes always, $v:expr) => { true };
    (@writes ptr, $v:expr) => { true };
}

/// An enum of the configuration API: its texts, its default and the message for any other text.
macro_rules! choice {
    (
        $(#[$meta:meta])*
        pub enum $name:ident { $( $(#[$vmeta:meta])* $variant:ident = $text:literal, )* }
        default $default:ident;
        wrong |$value:ident| $message:expr;
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name { $( $(#[$vmeta])* $variant, )* }

        impl $name {
            /// Every value.
            pub const ALL: &[Self] = &[$( Self::$variant, )*];

            /// The text in the file.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self { $( Self::$variant => $text, )* }
            }
        }

        impl Default for $name {
            fn default() -> Self {
                Self::$default
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl crate::field::Field for $name {
            fn read(
                value: &serde_json::Value,
                at: &str,
                out: &mut Vec<crate::problem::Problem>,
            ) -> Option<Self> {
                let text = <String as crate::field::Field>::read(value, at, out)?;
                match text.as_str() {
                    $( $text => Some(Self::$variant), )*
                    // Empty means "not set".
                    "" => None,
                    other => {
                        let $value = crate::duration::quote(other);
                        out.push(crate::problem::Problem::error(at, $message));
                        None
                    }
                }
            }
            fn write(&self) -> serde_json::Value {
                self.as_str().into()
            }
            fn is_zero(&self) -> bool {
                false
            }
        }
    };
}

pub(crate) use {choice, config_struct};
