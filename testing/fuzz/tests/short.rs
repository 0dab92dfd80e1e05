//! Every target for a little while, with its corpus: what was found once stays mended.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::time::Duration;

use fuzz::{TARGETS, engine};

#[test]
fn nothing_is_found_quickly() {
    for target in TARGETS {
        let corpus = engine::corpus(Path::new(env!("CARGO_MANIFEST_DIR")), target.name).unwrap();
        let tried = engine::run(target, &corpus, 7, Duration::MAX, 3_000);
        assert!(tried.is_ok(), "{}: {:?}", target.name, tried);
    }
}
