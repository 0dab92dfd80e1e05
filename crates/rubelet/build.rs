//! How the release is linked.

use std::env::var;

/// Set by `cargo xtask dist`, which has itself called as the linker and calls rustc's own with an order of functions: the path of their list.
const ORDER: &str = "RUBELET_ORDER";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed={ORDER}");
    if let Ok(list) = var(ORDER) {
        println!("cargo::rerun-if-changed={list}");
    }
    let is = |name: &str, wanted: &str| var(name).is_ok_and(|value| value == wanted);
    let flags = var("CARGO_ENCODED_RUSTFLAGS").unwrap_or_default();
    let about_linking = |flag: &str| flag.trim_start_matches("-C").trim_start().starts_with("link");
    // There rustc links with its own lld unless it is told otherwise; the linkers of other targets need not know this.
    let own_linker = is("TARGET", "x86_64-unknown-linux-gnu")
        && !flags.split('\u{1f}').any(about_linking)
        && (var("RUSTC_LINKER").is_err() || var(ORDER).is_ok());
    if is("PROFILE", "release") && own_linker {
        // Functions of the same code are one: what generic code comes to for types of the same shape. Rust does not promise that functions have
        // different addresses.
        println!("cargo::rustc-link-arg-bins=-Wl,--icf=all");
    }
}
