//! Generates messages and clients of the plugins' interfaces.

const FOLDER: &str = "proto";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed={FOLDER}");
    let descriptors = protox::compile(["csi.proto"], [FOLDER])?;
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
    // Here the kubelet serves too; and a plugin's side is for tests.
    let served = [
        "deviceplugin.proto",
        "dra.proto",
        "dra_health.proto",
        "podresources.proto",
        "podresources_v1alpha1.proto",
        "registration.proto",
    ];
    let descriptors = protox::compile(served, [FOLDER])?;
    tonic_prost_build::configure().build_transport(false).btree_map(".").compile_fds(descriptors)?;
    Ok(())
}
