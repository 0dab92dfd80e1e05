//! Compiles the interface's text into Rust messages; services are the business of `cri`.

use std::path::PathBuf;

const FILE: &str = "proto/runtime.proto";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed={FILE}");
    let descriptors = protox::compile([FILE], ["proto"])?;
    prost_build::Config::new()
        // Sorted maps: equal messages have equal bytes.
        .btree_map(["."])
        // It carries secrets; lib.rs writes its Debug by hand.
        .skip_debug([".runtime.v1.AuthConfig"])
        .out_dir(PathBuf::from(std::env::var("OUT_DIR")?))
        .compile_fds(descriptors)?;
    Ok(())
}
