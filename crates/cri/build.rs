//! Generates the clients of RuntimeService and ImageService over the messages of `cri-api`.

const FOLDER: &str = "../cri-api/proto";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed={FOLDER}");
    let descriptors = protox::compile(["runtime.proto"], [FOLDER])?;
    tonic_prost_build::configure()
        .build_server(false)
        .build_transport(false)
        .extern_path(".runtime.v1", "::cri_api::v1")
        .compile_fds(descriptors)?;
    Ok(())
}
