//! Generates messages and clients of the plugins' interfaces.

const FOLDER: &str = "proto";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed={FOLDER}");
    let descriptors = protox::compile(["csi.proto", "registration.proto"], [FOLDER])?;
    tonic_prost_build::configure()
        .build_server(false)
        .build_transport(false)
        // Sorted maps: equal messages have equal bytes.
        .btree_map(".")
        // They carry secrets: lib.rs writes their Debug by hand.
        .skip_debug([
            ".csi.v1.NodeStageVolumeRequest",
            ".csi.v1.NodePublishVolumeRequest",
            ".csi.v1.NodeExpandVolumeRequest",
        ])
        .compile_fds(descriptors)?;
    Ok(())
}
