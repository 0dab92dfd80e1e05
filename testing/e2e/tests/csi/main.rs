//! Volumes of CSI drivers, with a control plane and a driver of our own as a process (`testing/csi-driver`).
//!
//! The fixtures are what the Go kubelet 1.36.1 gave: `RUBELET_BIN=~/.cache/rubelet-lab/bin/kubelet RUBELET_E2E_RECORD=1` writes them anew.
#![allow(clippy::unwrap_used)]

mod disks;
mod driver;
mod faults;
mod growth;
mod life;
mod migrated;
mod volumes;

use std::process::ExitCode;

use e2e::cluster::{Test, main as harness};

fn main() -> ExitCode {
    const TESTS: &[Test] = &[
        ("csi_drivers_come_and_go", volumes::drivers_come_and_go),
        ("csi_volumes_are_mounted_as_by_the_go_kubelet", volumes::as_by_the_go_kubelet),
        ("a_csi_block_volume_is_a_device", volumes::a_block_volume_is_a_device),
        ("a_csi_volume_grows_or_says_why_not", growth::growth_that_fails),
        ("figures_and_health_of_csi_volumes", growth::figures_and_health),
        ("disks_without_a_driver", disks::disks_without_a_driver),
        ("disks_of_replaced_plugins_are_a_drivers", migrated::disks_of_replaced_plugins),
        ("csi_limits_are_asked_for_again", volumes::limits_change),
        ("kubernetes_own_mock_driver_is_served", volumes::mock_driver),
        ("csi_faults_are_told", faults::faults_are_told),
        ("a_csi_driver_that_hangs_holds_only_its_pods", faults::a_driver_that_hangs),
        ("twenty_pods_with_csi_volumes_survive_kills", life::twenty_pods),
        ("csi_volumes_are_handed_over_and_back", life::hand_over),
    ];
    harness(TESTS)
}
