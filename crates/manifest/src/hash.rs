//! The hashes that tie pods, containers and checkpoints to what was written down about them.

use std::fmt::Write;

/// FNV-1a with 32 bits.
pub(crate) fn fnv1a_32(bytes: impl AsRef<[u8]>) -> u32 {
    bytes.as_ref().iter().fold(0x811c_9dc5, |h, b| (h ^ u32::from(*b)).wrapping_mul(0x0100_0193))
}

/// FNV-1a with 128 bits.
pub(crate) fn fnv1a_128(bytes: impl AsRef<[u8]>) -> u128 {
    bytes.as_ref().iter().fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d, |h, b| {
        (h ^ u128::from(*b)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b)
    })
}

/// A JSON string as Go writes it: `<`, `>`, `&`, U+2028 and U+2029 escaped too.
pub(crate) fn go_json_string(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + text.len() / 8 + 2);
    out.push('"');
    // What needs no escape is most of it, and is taken in one piece.
    let special = |c: char| matches!(c, '"' | '\\' | '<' | '>' | '&' | '\u{2028}' | '\u{2029}' | '\0'..='\u{1f}');
    let mut plain = 0;
    for (at, found) in text.match_indices(special) {
        out.push_str(&text[plain..at]);
        plain = at + found.len();
        match found {
            "\"" => out.push_str("\\\""),
            "\\" => out.push_str("\\\\"),
            "\n" => out.push_str("\\n"),
            "\r" => out.push_str("\\r"),
            "\t" => out.push_str("\\t"),
            "\u{8}" => out.push_str("\\b"),
            "\u{c}" => out.push_str("\\f"),
            other => other.chars().for_each(|c| out.push_str(&format!("\\u{:04x}", c as u32))),
        }
    }
    out.push_str(&text[plain..]);
    out.push('"');
    out
}

/// The container's identity (annotation `io.kubernetes.container.hash`, KEP-1287): a running container with another one is
/// replaced. Only image and name count.
pub fn container_hash(image: &str, name: &str) -> u32 {
    let json = format!("{{\"image\":{},\"name\":{}}}", go_json_string(image), go_json_string(name));
    // As Go prints a slice of bytes: `([]uint8)[123 34 …]`.
    let mut text = String::with_capacity(16 + 4 * json.len());
    text.push_str("([]uint8)[");
    for (i, byte) in json.bytes().enumerate() {
        if i > 0 {
            text.push(' ');
        }
        let _ = write!(text, "{byte}");
    }
    text.push(']');
    fnv1a_32(text)
}

/// [`container_hash`] as the annotation holds it: lower hex, not padded.
pub fn container_hash_text(image: &str, name: &str) -> String {
    format!("{:x}", container_hash(image, name))
}

/// The checksum of a checkpoint whose data is a string.
pub fn string_checksum(data: &str) -> u32 {
    fnv1a_32(format!("(string){data}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn container_hashes() {
        for (name, image, want) in [
            ("web", "nginx:1.27", "e220f96"),
            ("app", "busybox", "3ada567e"),
            ("", "", "edd67cc4"),
            ("a<b>&c", "img", "2c48f3c1"),
        ] {
            assert_eq!(container_hash_text(image, name), want, "{name} {image}");
        }
    }

    #[test]
    fn checksums() {
        assert_eq!(string_checksum("{}"), 694_314_937);
    }
}
