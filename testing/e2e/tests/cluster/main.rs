//! A node in a cluster: what arrives from the API server runs, and what is seen on the node arrives there.
//!
//! The fixtures are what the Go kubelet 1.36.1 gave: `RUBELET_BIN=~/.cache/rubelet-lab/bin/kubelet RUBELET_E2E_RECORD=1` writes them anew.
#![allow(clippy::unwrap_used)]

mod admission;
mod connection;
mod credentials;
mod devices;
mod ends;
mod eviction;
mod figures;
mod files;
mod life;
mod mirrors;
mod node;
mod objects;
mod outages;
mod pods;
mod resize;
mod sessions;
mod streams;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use cri_api::v1::ContainerState;
use e2e::cluster::{Cluster, Test, main as harness, shape};
use e2e::seconds;
use serde_json::Value;

/// Each test with its name.
macro_rules! tests {
    ($($module:ident: $($name:ident)*;)*) => { &[$($((concat!(stringify!($module), "::", stringify!($name)), $module::$name)),*),*] };
}

fn main() -> ExitCode {
    const TESTS: &[Test] = tests! {
        node:
            the_object_is_as_the_go_kubelets
            the_lease_is_renewed
            a_restart_keeps_what_others_set
            a_deleted_object_is_made_again
            a_bootstrap_token_is_enough_to_join;
        pods:
            one_of_the_api_runs_and_its_status_is_complete
            one_is_scheduled_and_its_events_are_told
            a_crash_loop_is_told
            a_deleted_one_ends_within_its_grace
            a_deadline_is_told_after_the_end
            a_static_one_has_a_mirror
            those_that_end_have_a_final_status
            those_that_do_not_fit_are_rejected
            kubectl_logs_and_exec;
        objects:
            config_maps_and_secrets_arrive_and_their_changes
            a_pod_waits_for_what_it_names
            keys_are_names_and_later_sources_win
            files_have_the_right_owner_and_mode
            a_restarted_container_sees_the_new_file
            a_token_of_the_service_account
            services_are_in_the_environment
            many_services_and_a_start_that_fails_for_its_variables
            a_pod_learns_about_itself;
        life:
            hooks_at_the_end_take_no_more_than_the_grace
            a_hook_at_the_start_that_hangs_holds_up_no_end
            readiness_is_asked_while_a_pod_ends
            probes_know_their_container
            http_probes_follow_redirects_on_the_same_host
            probes_that_take_too_long_have_failed
            the_runtime_is_asked_for_classes_and_images;
        streams:
            a_log_is_followed_over_rotations
            the_log_of_the_container_before
            followers_that_go_leave_nothing
            memory_stays_flat
            pages_of_the_node
            the_port_is_for_those_who_may;
        sessions:
            sessions_carry_everything
            sessions_end_as_they_should
            many_at_once
            a_terminal_follows_its_window
            a_debugging_container;
        figures:
            kubectl_top_shows_the_node_and_its_pods
            pages_are_for_those_who_may_see_them;
        resize:
            up_and_down_while_the_container_runs
            with_a_restart_where_the_policy_asks_for_one
            when_there_is_room
            that_would_take_memory_in_use_fail
            of_the_pod_as_a_whole;
        outages:
            of_the_api_server_harm_no_pod
            of_the_kubelet_are_caught_up
            of_the_kubelet_do_not_cut_a_grace_short
            of_both_kill_nothing;
        mirrors:
            that_are_deleted_come_back_and_no_container_is_touched
            of_what_was_changed_while_the_api_server_was_away;
        admission:
            waits_for_the_node_and_then_judges_by_its_labels
            counts_nothing_that_has_ended
            gives_what_is_refused_to_the_next;
        ends:
            by_a_deadline_are_told_when_nothing_runs_any_more
            that_a_restart_comes_into_are_not_cut_short
            of_pods_that_are_gone_leave_nothing;
        eviction:
            limits_of_local_storage
            memory_of_the_pods
            disk_and_inodes;
        files:
            by_sub_path_are_new_in_a_new_container_only
            change_all_at_once_and_always_have_their_owner
            of_tokens_can_be_read_by_their_user;
        devices:
            of_a_plugin_are_told_in_the_node
            that_are_claimed_are_prepared_and_taken_back;
        connection:
            that_swallows_everything_is_left;
        credentials:
            that_are_bad_are_told_once_and_mended_without_a_restart;
    };
    harness(TESTS)
}

/// Long enough that no test sees its end.
const SLEEP: &str = "trap 'exit 0' TERM; sleep 1000000 & wait";

/// Compares with what the Go kubelet gave.
#[track_caller]
fn assert_fixture(name: &str, value: &Value) {
    let file =
        PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cluster/fixtures")).join(format!("{name}.json"));
    let text = serde_json::to_string_pretty(&shape(value)).unwrap() + "\n";
    if std::env::var_os("RUBELET_E2E_RECORD").is_some() {
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, text).unwrap();
        return;
    }
    let expected: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let given: Value = serde_json::from_str(&text).unwrap();
    let mut differences = Vec::new();
    compare("", &expected, &given, &mut differences);
    assert!(differences.is_empty(), "not as in {}:\n{}", file.display(), differences.join("\n"));
}

/// True when the program under test is rubelet, and so what it does better than the Go kubelet is due.
fn is_rubelet(cluster: &Cluster) -> bool {
    cluster.node.root().join("rubelet").exists()
}

/// Where two values differ, one line a place.
fn compare(at: &str, expected: &Value, given: &Value, out: &mut Vec<String>) {
    match (expected, given) {
        (Value::Object(e), Value::Object(g)) => {
            for key in e.keys().chain(g.keys().filter(|k| !e.contains_key(*k))) {
                compare(&format!("{at}.{key}"), &expected[key], &given[key], out);
            }
        }
        (Value::Array(e), Value::Array(g)) if e.len() == g.len() => {
            for (index, (e, g)) in e.iter().zip(g).enumerate() {
                compare(&format!("{at}[{index}]"), e, g, out);
            }
        }
        _ if expected != given => out.push(format!("{at}: expected {expected}, is {given}")),
        _ => {}
    }
}

/// Waits until nothing of the pod runs or holds anything. The Go kubelet removes ended containers, sandboxes and logs once a minute only.
#[track_caller]
fn nothing_left(cluster: &Cluster, uid: &str) {
    let running = |id: &str| {
        let all = cluster.node.containers();
        all.iter().any(|c| c.id == id && c.state() == ContainerState::ContainerRunning)
    };
    let left = || -> Vec<String> {
        let counts = |l: &String| match l.split_once(' ') {
            Some(("container", id)) => running(id),
            Some((what, _)) => what != "sandbox" && what != "logs",
            None => true,
        };
        cluster.node.leftovers(uid).into_iter().filter(counts).collect()
    };
    assert!(rig::poll(seconds(30), || left().is_empty()), "left of the pod {uid}: {:#?}", left());
}
