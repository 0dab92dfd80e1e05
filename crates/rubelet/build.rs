//! How the release is linked.

use std::env::var;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let is = |name: &str, wanted: &str| var(name).is_ok_and(|value| value == wanted);
    // There rustc links with its own lld unless it is told otherwise; the linkers of other targets need not know this.
    let own_linker = is("TARGET", "x86_64-unknown-linux-gnu")
        && !var("CARGO_ENCODED_RUSTFLAGS").is_ok_and(|flags| flags.contains("link"))
        && var("RUSTC_LINKER").is_err();
    if is("PROFILE", "release") && own_linker {
        // Functions of the same code are one: what generic code comes to for types of the same shape. Rust does not promise that functions have
        // different addresses.
        println!("cargo::rustc-link-arg-bins=-Wl,--icf=all");
    }
}
