//! `cargo xtask dist`: rubelet as it is released, and as everything here measures it.
//!
//! One build: symbols are named so that generic arguments stand in them (v0), [`crate::order`] puts the functions that run together when the program is
//! linked, and paths of this machine are left out, so that the same source gives the same file wherever it is built. The program with its symbols
//! stays in `target/release`, for profiles and backtraces; what is released is the same without them, in `target/dist`.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::order;
use crate::setup;
use crate::shell::Shell;

/// The list of functions, below the root.
pub(crate) const LIST: &str = "crates/rubelet/functions.order";

/// Builds, packs (this program, if one is given), and says what came out.
///
/// # Errors
/// With the compiler's last words, or those of what packs.
pub(crate) fn run(shell: &Shell, program: Option<PathBuf>) -> Result<bool> {
    let program = match program {
        Some(program) => program,
        None => setup::rubelet(shell, true)?,
    };
    let packed = crate::package::make(shell, &program)?;
    for file in [program].iter().chain(&packed) {
        println!("{}: {} bytes", file.display(), fs::metadata(file).map_or(0, |m| m.len()));
    }
    Ok(true)
}

/// Builds what is released.
///
/// # Errors
/// As [`run`].
pub(crate) fn build(shell: &Shell) -> Result<PathBuf> {
    let whole = with_symbols(shell)?;
    let dir = setup::target().join("dist");
    fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let program = dir.join("rubelet");
    strip(shell, &whole, &program)?;
    Ok(program)
}

/// Writes a program without its symbols.
///
/// # Errors
/// There is no `strip`, or it fails.
pub(crate) fn strip(shell: &Shell, from: &Path, to: &Path) -> Result<()> {
    let mut command = Command::new("strip");
    command.arg("--strip-all").arg("-o").arg(to).arg(from);
    shell.need("stripping the program", &mut command, Duration::from_secs(60))
}

/// Builds the same with its symbols.
///
/// # Errors
/// As [`run`].
pub(crate) fn with_symbols(shell: &Shell) -> Result<PathBuf> {
    let mut command = setup::cargo();
    command.args(["build", "--release", "--package", "rubelet"]);
    command.env("CARGO_PROFILE_RELEASE_STRIP", "none");
    command.env("CARGO_ENCODED_RUSTFLAGS", flags());
    if cfg!(all(target_arch = "x86_64", target_os = "linux", target_env = "gnu")) && !other_linker() {
        command.env("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_LINKER", std::env::current_exe()?);
        command.env(order::LIST, crate::root().join(LIST));
    }
    shell.need("building the release of rubelet", &mut command, Duration::from_secs(3600))?;
    setup::built("rubelet", true)
}

/// Somebody wants another linker than rustc's own.
fn other_linker() -> bool {
    let set = |name: &str| std::env::var_os(name).is_some();
    set("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_LINKER") || set("CARGO_BUILD_TARGET")
}

/// rustc's flags: those of the environment, and ours. Each ends at a unit separator, as cargo reads them.
fn flags() -> OsString {
    let mut flags: Vec<OsString> = match (std::env::var_os("CARGO_ENCODED_RUSTFLAGS"), std::env::var("RUSTFLAGS")) {
        (Some(encoded), _) => vec![encoded],
        (None, Ok(plain)) => plain.split_whitespace().map(OsString::from).collect(),
        (None, Err(_)) => Vec::new(),
    };
    flags.push("-Csymbol-mangling-version=v0".into());
    let cargo = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let cargo = cargo.or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cargo")));
    for (dir, name) in [(cargo, "/cargo"), (Some(crate::root().to_owned()), "/rubelet")] {
        if let Some(dir) = dir {
            let mut flag = OsString::from("--remap-path-prefix=");
            flag.push(dir);
            flag.push("=");
            flag.push(name);
            flags.push(flag);
        }
    }
    flags.join(OsStr::new("\u{1f}"))
}
