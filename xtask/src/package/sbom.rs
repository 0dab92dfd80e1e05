//! The list of what the program is made of, in SPDX 2.3 (<https://spdx.github.io/spdx-spec/v2.3/>).

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};
use serde_json::{Value, json};

/// The program that is shipped.
const PROGRAM: &str = "rubelet";

/// The document, from what `cargo metadata` tells.
///
/// # Errors
/// It does not tell of the program.
pub(super) fn spdx(metadata: &Value, version: &str, commit: &str, stamp: &str) -> Result<String> {
    let list = |of: &Value| of.as_array().cloned().unwrap_or_default();
    let text = |of: &Value| of.as_str().unwrap_or_default().to_owned();
    let packages: BTreeMap<String, Value> =
        list(&metadata["packages"]).into_iter().map(|p| (text(&p["id"]), p)).collect();
    let nodes: BTreeMap<String, Value> =
        list(&metadata["resolve"]["nodes"]).into_iter().map(|n| (text(&n["id"]), n)).collect();
    let root = packages.iter().find(|(_, p)| p["name"] == PROGRAM).map(|(id, _)| id.clone());
    let root = root.context("cargo metadata tells of no package rubelet")?;
    // What is linked in: not what builds or tests.
    let linked = |id: &str| -> Vec<String> {
        let deps = nodes.get(id).map(|n| list(&n["deps"])).unwrap_or_default();
        let normal = |d: &Value| list(&d["dep_kinds"]).iter().any(|k| k["kind"].is_null());
        deps.iter().filter(|d| normal(d)).map(|d| text(&d["pkg"])).collect()
    };
    let (mut found, mut todo) = (BTreeSet::from([root.clone()]), vec![root.clone()]);
    let mut relations = vec![json!({
        "spdxElementId": "SPDXRef-DOCUMENT", "relationshipType": "DESCRIBES", "relatedSpdxElement": reference(&packages[&root]),
    })];
    while let Some(id) = todo.pop() {
        for dep in linked(&id) {
            relations.push(json!({
                "spdxElementId": reference(&packages[&id]), "relationshipType": "DEPENDS_ON",
                "relatedSpdxElement": reference(&packages[&dep]),
            }));
            if found.insert(dep.clone()) {
                todo.push(dep);
            }
        }
    }
    let described = found.iter().map(|id| {
        let package = &packages[id];
        let license = package["license"].as_str().map_or("NOASSERTION".to_owned(), |l| l.replace('/', " OR "));
        let download = package["repository"].as_str().unwrap_or("NOASSERTION");
        json!({
            "SPDXID": reference(package), "name": package["name"], "versionInfo": package["version"],
            "licenseDeclared": license, "licenseConcluded": "NOASSERTION", "copyrightText": "NOASSERTION",
            "downloadLocation": download, "filesAnalyzed": false,
            "externalRefs": [{
                "referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl",
                "referenceLocator": format!("pkg:cargo/{}@{}", text(&package["name"]), text(&package["version"])),
            }],
        })
    });
    let created = jiff::Timestamp::from_second(stamp.parse().context("the commit's time")?)?;
    let document = json!({
        "spdxVersion": "SPDX-2.3", "dataLicense": "CC0-1.0", "SPDXID": "SPDXRef-DOCUMENT",
        "name": format!("{PROGRAM}-{version}"), "documentNamespace": format!("urn:rubelet:{version}:{commit}"),
        "creationInfo": {"created": created.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(), "creators": ["Tool: cargo xtask dist"]},
        "packages": described.collect::<Vec<_>>(), "relationships": relations,
    });
    Ok(serde_json::to_string_pretty(&document)? + "\n")
}

/// An identifier of letters, digits, dots and dashes.
fn reference(package: &Value) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '.' || c == '-' { c } else { '-' };
    let (name, version) =
        (package["name"].as_str().unwrap_or_default(), package["version"].as_str().unwrap_or_default());
    format!("SPDXRef-{}", format!("{name}-{version}").chars().map(plain).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_linked_in_is_listed() {
        let package =
            |id: &str, name: &str| json!({"id": id, "name": name, "version": "1.0.0", "license": "MIT/Apache-2.0"});
        let dep = |pkg: &str, kind: Value| json!({"pkg": pkg, "dep_kinds": [{"kind": kind}]});
        let metadata = json!({
            "packages": [package("r", "rubelet"), package("a", "a_b"), package("t", "test-only"), package("x", "other")],
            "resolve": {"nodes": [
                {"id": "r", "deps": [dep("a", Value::Null), dep("t", json!("dev"))]}, {"id": "a", "deps": []},
                {"id": "t", "deps": []}, {"id": "x", "deps": []},
            ]},
        });
        let document: Value = serde_json::from_str(&spdx(&metadata, "0.1.0", "abc", "0").unwrap()).unwrap();
        let names: Vec<_> = document["packages"].as_array().unwrap().iter().map(|p| p["name"].clone()).collect();
        assert_eq!(names, ["a_b", "rubelet"]);
        assert_eq!(document["packages"][0]["licenseDeclared"], "MIT OR Apache-2.0");
        assert_eq!(document["relationships"][1]["relatedSpdxElement"], "SPDXRef-a-b-1.0.0");
        assert_eq!(document["creationInfo"]["created"], "1970-01-01T00:00:00Z");
    }
}
