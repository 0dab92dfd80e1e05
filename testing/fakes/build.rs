//! Generates the server side of RuntimeService and ImageService; the product itself only needs clients.

const FOLDER: &str = "../../crates/cri-api/proto";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed={FOLDER}");
    let descriptors = protox::compile(["runtime.proto"], [FOLDER])?;
    tonic_prost_build::configure()
        .build_client(false)
        .extern_path(".runtime.v1", "::cri_api::v1")
        .compile_fds(descriptors)?;
    Ok(())
}
