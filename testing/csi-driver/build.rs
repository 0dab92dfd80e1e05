//! Generates the server side of the plugins' interfaces; the product itself only needs clients.

const FOLDER: &str = "../../crates/plugins/proto";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed={FOLDER}");
    let descriptors = protox::compile(["csi.proto", "registration.proto"], [FOLDER])?;
    tonic_prost_build::configure()
        .build_client(false)
        .extern_path(".csi.v1", "::plugins::wire::csi_v1")
        .extern_path(".pluginregistration", "::plugins::wire::registration_v1")
        .compile_fds(descriptors)?;
    Ok(())
}
