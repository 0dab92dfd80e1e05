//! rubelet: a Kubernetes node agent. `wire.rs` is the map of the program.

mod agent;
mod check;
mod claims;
mod cli;
mod credentials;
mod eviction;
mod explain;
mod figures;
mod heap;
mod https;
mod join;
mod machine;
mod managers;
mod manifest_dir;
mod node;
mod node_host;
mod node_object;
mod objects;
mod oom;
mod plugin_volumes;
mod pod_cidr;
mod pods;
mod shutdown;
mod startup;
mod table;
mod version;
mod view;
mod wire;

use std::process::ExitCode;

fn main() -> ExitCode {
    let argv: Vec<String> = std::env::args_os().map(|a| a.to_string_lossy().into_owned()).collect();
    match cli::start(&argv) {
        cli::Start::Agent(args) => agent::run(&args),
        cli::Start::Done(code) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
    }
}
