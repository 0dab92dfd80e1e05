//! The order of functions in the release: those that run stand together at the front of its code.
//!
//! The kernel maps 64 KiB around each page of a program that is touched. Functions that run lie scattered over all of it, so nearly all of it becomes
//! resident, though a third of it is ever touched. `crates/rubelet/functions.order` names the functions that ran while somebody watched ([`crate::record`]);
//! the linker puts them first.
//!
//! Symbols hold hashes that change with the compiler and each dependency. So the list has hashes of its own, of the functions' names as people read them: with
//! all their generic arguments, without what tells versions of a crate apart. Which symbols these are today is known when the program has been compiled and is
//! about to be linked: rustc is given this very program as its linker ([`link`]), which looks into the objects, writes the order as the linker reads it, and
//! calls the linker. A function that is no longer there, or has another name, costs nothing but its place; when anything is not as expected, the
//! program is linked without an order.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use object::{Object as _, ObjectSymbol as _, SymbolKind};
use sha2::{Digest as _, Sha256};

/// The environment variable with the path of the list; where it is set, this program is the linker.
pub(crate) const LIST: &str = "RUBELET_ORDER";

/// What the list has for the function of this symbol; None when no Rust compiler named it.
pub(crate) fn key(symbol: &str) -> Option<u64> {
    // What the optimizer adds when it makes a function visible beyond its unit.
    let symbol = symbol.split(".llvm.").next().unwrap_or(symbol);
    let name = rustc_demangle::try_demangle(symbol).ok()?;
    let digest = Sha256::digest(format!("{name:#}"));
    Some(digest.iter().take(8).fold(0, |key, byte| key << 8 | u64::from(*byte)))
}

/// The keys of a list, in their order. What is not a key is passed over.
pub(crate) fn parse(list: &str) -> Vec<u64> {
    let lines = list.lines().filter(|line| !line.starts_with('#'));
    lines.filter_map(|line| u64::from_str_radix(line.trim(), 16).ok()).collect()
}

/// The list as it is written: `head` in comments, then the keys.
pub(crate) fn format(head: &str, keys: &[u64]) -> String {
    let mut text: String = head.lines().map(|line| format!("# {line}\n")).collect();
    for key in keys {
        let _ = writeln!(text, "{key:016x}");
    }
    text
}

/// The functions that an object or program defines, by address.
///
/// # Errors
/// It cannot be read, or is no object.
pub(crate) fn functions(file: &Path) -> Result<Vec<String>> {
    let bytes = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    let object = object::File::parse(&*bytes).with_context(|| format!("{} is no object", file.display()))?;
    let mut found: Vec<(u64, String)> = object
        .symbols()
        .filter(|symbol| symbol.is_definition() && symbol.kind() == SymbolKind::Text)
        .filter_map(|symbol| Some((symbol.address(), symbol.name().ok()?.to_owned())))
        .collect();
    found.sort();
    Ok(found.into_iter().map(|(_, name)| name).collect())
}

/// The symbols among these that the list names, in its order, each on a line.
fn ordered(list: &[u64], symbols: Vec<String>) -> String {
    let mut by_key: HashMap<u64, Vec<String>> = HashMap::new();
    for symbol in symbols {
        if let Some(key) = key(&symbol) {
            by_key.entry(key).or_default().push(symbol);
        }
    }
    let mut text = String::new();
    for symbol in list.iter().filter_map(|key| by_key.remove(key)).flatten() {
        let _ = writeln!(text, "{symbol}");
    }
    text
}

/// Links what rustc wants linked, rubelet in the order of the list. The linker's exit code.
///
/// # Errors
/// The linker cannot be started.
pub(crate) fn link(list: &OsStr, arguments: Vec<OsString>) -> Result<u8> {
    let mut command = Command::new("cc");
    command.args(&arguments);
    if let Some(output) = program(&arguments) {
        match order_file(Path::new(list), &arguments, &output) {
            Ok(file) => {
                command.arg(format!("-Wl,--symbol-ordering-file={}", file.display()));
                // Of what is listed and folded into another function, or not taken into the program.
                command.arg("-Wl,--no-warn-symbol-ordering");
            }
            Err(e) => eprintln!("linked without an order of functions: {e:#}"),
        }
    }
    let status = command.status().context("cannot start cc")?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

/// Where rubelet is linked to, when this is about rubelet, and the linker is one that takes an order.
fn program(arguments: &[OsString]) -> Option<PathBuf> {
    let at = arguments.iter().position(|a| a == "-o")?;
    let output = PathBuf::from(arguments.get(at + 1)?);
    let named = output.file_name()?.to_str().is_some_and(|name| name.starts_with("rubelet-"));
    (named && arguments.iter().any(|a| a == "-fuse-ld=lld")).then_some(output)
}

fn order_file(list: &Path, arguments: &[OsString], output: &Path) -> Result<PathBuf> {
    let text = fs::read_to_string(list).with_context(|| format!("cannot read {}", list.display()))?;
    let mut symbols = Vec::new();
    for object in arguments.iter().map(Path::new).filter(|a| a.extension().is_some_and(|e| e == "o")) {
        symbols.extend(functions(object)?);
    }
    let file = output.with_extension("order");
    fs::write(&file, ordered(&parse(&text), symbols)).with_context(|| format!("cannot write {}", file.display()))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same function of two versions of a crate, and with another type.
    const OURS: &str = "_RINvNtC3std3mem8align_ofNtNtC3std3mem12DiscriminantE";
    const THEIRS: &str = "_RINvNtCs1234_3std3mem8align_ofNtNtCsaZ09_3std3mem12DiscriminantE";
    const OTHER: &str = "_RINvNtC3std3mem8align_ofmE";

    #[test]
    fn a_key_is_of_the_name_without_what_changes() {
        assert!(key(OURS).is_some());
        assert_eq!(key(OURS), key(THEIRS));
        assert_ne!(key(OURS), key(OTHER));
        assert_eq!(key(&format!("{OURS}.llvm.123")), key(OURS));
        let old = |hash: &str| format!("_ZN4core3fmt5Write9write_fmt17h{hash}E");
        assert_eq!(key(&old("0123456789abcdef")), key(&old("fedcba9876543210")));
        assert_eq!(key("memcpy"), None);
    }

    #[test]
    fn a_list_is_read_as_it_was_written() {
        let text = format("made so\nand so", &[1, u64::MAX]);
        assert_eq!(text, "# made so\n# and so\n0000000000000001\nffffffffffffffff\n");
        assert_eq!(parse(&text), [1, u64::MAX]);
        assert_eq!(parse("0000000000000001\nnonsense\n\n"), [1]);
    }

    #[test]
    fn symbols_come_in_the_order_of_the_list() {
        let [ours, other] = [OURS, OTHER].map(|s| key(s).unwrap());
        let symbols = vec!["memcpy".to_owned(), OURS.to_owned(), OTHER.to_owned(), THEIRS.to_owned()];
        // What is listed and not there is left out, what is there and not listed too; twice listed counts once.
        assert_eq!(ordered(&[other, 7, ours, other], symbols), format!("{OTHER}\n{OURS}\n{THEIRS}\n"));
    }

    #[test]
    fn only_rubelet_gets_an_order_and_only_from_lld() {
        let arguments = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
        let fine = arguments("-m64 a.o -o target/release/deps/rubelet-0123 -fuse-ld=lld");
        assert_eq!(program(&fine), Some(PathBuf::from("target/release/deps/rubelet-0123")));
        assert_eq!(program(&arguments("a.o -o target/release/deps/rubelet-0123")), None);
        assert_eq!(program(&arguments("a.o -o target/release/build/x/build_script_build-1 -fuse-ld=lld")), None);
        assert_eq!(program(&arguments("a.o -fuse-ld=lld -o")), None);
    }

    #[test]
    fn functions_of_a_program() {
        let own = functions(&std::env::current_exe().unwrap()).unwrap();
        assert!(own.iter().filter_map(|name| key(name)).count() > 100);
        assert!(functions(Path::new("/etc/passwd")).is_err());
    }
}
