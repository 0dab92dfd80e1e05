//! Whatever is in the directory: no panic, an answer in bounded time, the same answer each time.

use std::time::{Duration, Instant};

use manifest::{Gates, Origin, load};
use model::Timestamp;
use proptest::prelude::*;

fn answer(bytes: &[u8]) -> String {
    let at = Instant::now();
    let mut out = String::new();
    for origin in [Origin::File("/m/x".into()), Origin::Url("http://x/".into())] {
        match load(bytes, &origin, "node-a", Timestamp::UNIX_EPOCH, &Gates::default()) {
            Ok(pods) => {
                for pod in pods {
                    out += &pod.map_or_else(|e| e.to_string(), |p| p.uid().to_string());
                }
            }
            Err(e) => out += &e.to_string(),
        }
    }
    assert!(at.elapsed() < Duration::from_secs(10), "too slow");
    out
}

const MANIFESTS: [&[u8]; 5] = [
    include_bytes!("manifests/a.yaml"),
    include_bytes!("manifests/b.yaml"),
    include_bytes!("manifests/c.json"),
    include_bytes!("manifests/k.yaml"),
    include_bytes!("manifests/q.yaml"),
];

#[test]
fn bombs() {
    let mut laughs = String::from("a0: &a0 [x,x,x,x,x,x,x,x,x]\n");
    for i in 1..20 {
        let p = i - 1;
        laughs += &format!("a{i}: &a{i} [*a{p},*a{p},*a{p},*a{p},*a{p},*a{p},*a{p},*a{p},*a{p}]\n");
    }
    assert!(answer(laughs.as_bytes()).contains("excessive aliasing"));
    let wide = format!("a: &a {}\nb: [{}]\n", "x".repeat(1 << 20), "*a,".repeat(1 << 16));
    assert!(answer(wide.as_bytes()).contains("excessive aliasing"));
    for open in ["[", "{", "- ", "{a: ", "{\"a\":"] {
        assert!(!answer(open.repeat(1 << 18).as_bytes()).is_empty());
    }
    assert!(answer(format!("{{\"kind\":{}", "[".repeat(1 << 20)).as_bytes()).contains("exceeded max depth"));
}

#[test]
fn many_keys() {
    let keys: String = (0..100_000).map(|i| format!("k{i}: 1\n")).collect();
    assert!(answer(keys.as_bytes()).contains("Object 'Kind' is missing"));
    let labels: String = (0..20_000).map(|i| format!("\"k{i}\":\"v\",")).collect();
    let text = format!(
        "{{\"apiVersion\":\"v1\",\"kind\":\"Pod\",\"metadata\":{{\"name\":\"a\",\"labels\":{{{}}}}},\"spec\":{{\"containers\":[{{\"name\":\"c\",\
         \"image\":\"a\"}}]}}}}",
        labels.trim_end_matches(',')
    );
    assert!(!answer(text.as_bytes()).contains("invalid"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn random_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        answer(&bytes);
    }

    #[test]
    fn random_text(text in "[-a-z0-9:{}\\[\\],&*!|>'\"#%@ \\n\\t?~]{0,200}") {
        answer(text.as_bytes());
        answer(format!("{{{text}").as_bytes());
    }

    #[test]
    fn mutated_manifests(which in 0..MANIFESTS.len(), cuts in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0u8..4), 1..6)) {
        let mut bytes = MANIFESTS[which].to_vec();
        for (at, byte, how) in cuts {
            let at = at.index(bytes.len());
            match how {
                0 => bytes[at] = byte,
                1 => bytes.insert(at, byte),
                2 => { bytes.remove(at); }
                _ => { let tail = bytes[at..].to_vec(); bytes.extend(tail); }
            }
        }
        prop_assert_eq!(answer(&bytes), answer(&bytes));
    }
}
