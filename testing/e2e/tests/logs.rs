//! Container logs are kept to their size and number, and no line is lost on the way.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use e2e::{Node, Options, Share, container, lines, pod, seconds, wait_until};
use serde_json::{Value, json};

const FILES: usize = 5;

/// The container's log files, the oldest first, the live one last.
fn files(node: &Node, pod: &Value) -> Vec<PathBuf> {
    let text = |key: &str| pod["metadata"][key].as_str().unwrap().to_owned();
    let dir = node.logs().join(format!("{}_{}_{}", text("namespace"), text("name"), text("uid"))).join("c");
    let mut all: Vec<PathBuf> = fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path()).collect();
    // 0.log sorts before 0.log.TIME.
    all.sort();
    let live = all.iter().position(|p| p.extension().is_some_and(|e| e == "log"));
    if let Some(live) = live {
        let live = all.remove(live);
        all.push(live);
    }
    all
}

fn content(file: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    let bytes = fs::File::open(file)?;
    if file.extension().is_some_and(|e| e == "gz") {
        flate2::read::MultiGzDecoder::new(bytes).read_to_string(&mut text)?;
    } else {
        std::io::BufReader::new(bytes).read_to_string(&mut text)?;
    }
    Ok(text)
}

/// The files, at most `limit` and the older ones compressed, and the numbers at the beginning of their lines.
fn settled(node: &Node, pod: &Value, limit: usize) -> (Vec<PathBuf>, Vec<u64>) {
    let has = |file: &PathBuf, extension: &str| file.extension().is_some_and(|e| e == extension);
    let (now, text) = wait_until("few enough files, the old ones compressed", seconds(30), || {
        let now = files(node, pod);
        let plain = now.iter().filter(|f| !has(f, "gz")).count();
        if now.len() > limit || plain > 2 || now.iter().any(|f| has(f, "tmp")) {
            return None;
        }
        // Between two rotations.
        let text = now.iter().map(|f| content(f)).collect::<std::io::Result<String>>().ok()?;
        (files(node, pod) == now).then_some((now, text))
    });
    let number = |l: &String| l.split(' ').next().and_then(|n| n.parse().ok());
    let numbers =
        lines(&text).iter().map(|l| number(l).unwrap_or_else(|| panic!("not a line of ours: {l:?}"))).collect();
    (now, numbers)
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn rotation_keeps_size_and_number_and_every_line() {
    let node = Node::with(Options::default().config(json!({
        "containerLogMaxSize": "1Mi", "containerLogMaxFiles": FILES, "containerLogMonitorInterval": "3s",
    })));
    let share = Share::new(&node);
    // Lines all the time, as fast as told: some fall into every moment of a rotation.
    let script = "awk 'BEGIN { pad = sprintf(\"%90s\", \"\"); gsub(/ /, \"x\", pad);
        while (1) { pace = 0; getline pace < \"/share/pace\"; close(\"/share/pace\"); if (pace == 0) { print \"end\" > \"/share/at\"; close(\"/share/at\"); system(\"usleep 100000\"); continue }
          for (i = 0; i < pace; i++) printf \"%08d %s\\n\", n++, pad; fflush(); print n > \"/share/at\"; close(\"/share/at\"); system(\"usleep 20000\") } }'";
    share.put("pace", "0\n");
    node.write(
        "talks.yaml",
        &share.mounted(pod("talks", [container("c", script), container("quiet", "echo once; exec sleep 1000000")])),
    );
    let talks = node.wait_running("talks");
    let written = || share.read("at").trim().parse::<u64>().unwrap_or_default();

    // About 100 KiB a look, until three rotations have been seen: nothing is removed so far.
    share.put("pace", "60\n");
    let rotated = || files(&node, &talks).iter().filter(|f| f.extension().is_none_or(|e| e != "log")).count();
    wait_until("three rotations", seconds(90), || (rotated() >= 3).then_some(()));
    share.put("pace", "0\n");
    wait_until("it has stopped", seconds(10), || share.read("at").starts_with("end").then_some(()));
    let (now, all) = settled(&node, &talks, FILES);
    let wanted: Vec<u64> = (0..all.len() as u64).collect();
    assert!(
        all == wanted,
        "{} lines in {now:?}; the first that is not in its place: {:?}",
        all.len(),
        all.iter().zip(&wanted).find(|(a, b)| a != b)
    );
    assert!(now.iter().any(|f| f.extension().is_some_and(|e| e == "gz")), "{now:?}");
    let mode = |f: &PathBuf| fs::metadata(f).unwrap().permissions().mode() & 0o7777;
    let live = now.last().unwrap();
    assert!(
        now.iter().all(|f| mode(f) == mode(live)),
        "{:?}",
        now.iter().map(|f| format!("{} {:o}", f.display(), mode(f))).collect::<Vec<_>>()
    );
    assert_eq!(live.file_name().unwrap(), "0.log");

    // On and on: no more files than allowed, and what is there has no gap.
    share.put("pace", "120\n");
    let goal = all.len() as u64 + 60_000;
    wait_until("it wrote 6 MiB more", seconds(90), || (written() >= goal).then_some(()));
    share.put("pace", "0\n");
    wait_until("it has stopped", seconds(10), || share.read("at").starts_with("end").then_some(()));
    let (now, rest) = settled(&node, &talks, FILES);
    assert!(rest.windows(2).all(|w| w[1] == w[0] + 1), "a gap: {:?}", rest.windows(2).find(|w| w[1] != w[0] + 1));
    assert!(*rest.last().unwrap() >= goal - 1, "the newest lines are missing");
    assert!(now.len() >= 3, "{now:?}");
    // The link that log collectors follow leads to the live file.
    let link = fs::read_dir("/var/log/containers")
        .unwrap()
        .flatten()
        .map(|e| e.path())
        .find(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("talks-e2e_default_c-")))
        .unwrap();
    assert_eq!(fs::canonicalize(&link).unwrap(), fs::canonicalize(now.last().unwrap()).unwrap());
    // One that says little has one file.
    let quiet = now[0].parent().unwrap().parent().unwrap().join("quiet");
    assert_eq!(fs::read_dir(quiet).unwrap().count(), 1);
}
