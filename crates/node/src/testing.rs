//! Objects for tests.

use model::api::{Node, ObjectMeta};

/// A node with nothing but an identity.
pub(crate) fn node(name: &str, uid: &str, version: &str) -> Node {
    Node {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            uid: Some(uid.to_owned()),
            resource_version: Some(version.to_owned()),
            ..ObjectMeta::default()
        },
        ..Node::default()
    }
}
