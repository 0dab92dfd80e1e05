//! Trust anchors of ClusterTrustBundles (KEP-3257): which bundles a projection selects, and what its file holds.

use std::collections::BTreeMap;
use std::collections::BTreeSet;

use base64::Engine;
use model::k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

/// True when a selector selects an object with these labels. None selects nothing, an empty one everything.
///
/// # Errors
/// An operator that does not exist.
pub fn selects(selector: Option<&LabelSelector>, labels: &BTreeMap<String, String>) -> Result<bool, String> {
    let Some(selector) = selector else { return Ok(false) };
    let mut all = selector.match_labels.iter().flatten().all(|(k, v)| labels.get(k) == Some(v));
    for e in selector.match_expressions.iter().flatten() {
        let value = labels.get(&e.key);
        let listed = value.is_some_and(|v| e.values.iter().flatten().any(|w| w == v));
        all &= match e.operator.as_str() {
            "In" => listed,
            "NotIn" => !listed,
            "Exists" => value.is_some(),
            "DoesNotExist" => value.is_none(),
            other => return Err(format!("{other:?} is not a valid label selector operator")),
        };
    }
    Ok(all)
}

/// All certificates of PEM texts, each once, as PEM. Their order means nothing; it is the same for the same certificates, so that nothing
/// is written again.
pub fn anchors<'a>(bundles: impl IntoIterator<Item = &'a str>) -> Vec<u8> {
    let mut found: BTreeSet<Vec<u8>> = BTreeSet::new();
    for bundle in bundles {
        found.extend(blocks(bundle));
    }
    let mut pem = String::new();
    for der in found {
        pem.push_str("-----BEGIN CERTIFICATE-----\n");
        let text = base64::engine::general_purpose::STANDARD.encode(der);
        for line in text.as_bytes().chunks(64) {
            pem.push_str(&String::from_utf8_lossy(line));
            pem.push('\n');
        }
        pem.push_str("-----END CERTIFICATE-----\n");
    }
    pem.into_bytes()
}

/// Content of each PEM block; the API server let only certificates through.
fn blocks(text: &str) -> Vec<Vec<u8>> {
    let mut blocks = Vec::new();
    let mut open: Option<String> = None;
    for line in text.lines().map(str::trim) {
        if line.starts_with("-----BEGIN ") {
            open = Some(String::new());
        } else if line.starts_with("-----END ") {
            let body = open.take().and_then(|b| base64::engine::general_purpose::STANDARD.decode(b).ok());
            blocks.extend(body);
        } else if let Some(body) = &mut open {
            body.push_str(line);
        }
    }
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "-----BEGIN CERTIFICATE-----\nYQ==\n-----END CERTIFICATE-----\n";
    const B: &str = "-----BEGIN CERTIFICATE-----\nYg==\n-----END CERTIFICATE-----\n";

    #[test]
    fn each_anchor_once() {
        let both = format!("{A}{B}");
        let twice = format!("words\n{B}\n{A}{B}");
        assert_eq!(String::from_utf8(anchors([A, twice.as_str()])).unwrap(), both);
        assert!(anchors([]).is_empty());
    }

    #[test]
    fn selectors() {
        let labels = BTreeMap::from([("a".to_owned(), "1".to_owned())]);
        for (selector, want) in [
            (r"{}", Ok(true)),
            (r#"{"matchLabels":{"a":"1"}}"#, Ok(true)),
            (r#"{"matchLabels":{"a":"2"}}"#, Ok(false)),
            (r#"{"matchExpressions":[{"key":"a","operator":"In","values":["0","1"]}]}"#, Ok(true)),
            (r#"{"matchExpressions":[{"key":"a","operator":"NotIn","values":["1"]}]}"#, Ok(false)),
            (r#"{"matchExpressions":[{"key":"b","operator":"NotIn","values":["1"]}]}"#, Ok(true)),
            (
                r#"{"matchExpressions":[{"key":"a","operator":"Exists"},{"key":"b","operator":"DoesNotExist"}]}"#,
                Ok(true),
            ),
            (r#"{"matchExpressions":[{"key":"a","operator":"Gt"}]}"#, Err(())),
        ] {
            let selector: LabelSelector = serde_json::from_str(selector).unwrap();
            assert_eq!(selects(Some(&selector), &labels).map_err(|_| ()), want, "{selector:?}");
        }
        assert_eq!(selects(None, &labels), Ok(false));
    }
}
