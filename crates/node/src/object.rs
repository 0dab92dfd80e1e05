//! The newest Node object: one watch for everybody who needs to know it.
//!
//! Task: owned by [`start`], ends with [`Tasks::stop`]. Input: a reflector on this one object, whose deltas wait in a queue of 4; the
//! answers to own writes come in beside it. Output: a watch channel with the newest object. API server slow or gone: the last object
//! stays, the reflector tries again with backoff.

use std::sync::Arc;

use cluster::reflect::{Collection, Delta, Reflector, ReflectorStatus, Scope, version_of};
use model::api::Node;
use pod::ports::{Random, Tasks};
use tokio::sync::{mpsc, watch};

/// What is known of the object; clones share it.
#[derive(Clone)]
pub(crate) struct NodeObject {
    node: watch::Sender<Option<Arc<Node>>>,
    /// The first picture has come.
    synced: watch::Receiver<bool>,
    reflector: watch::Receiver<ReflectorStatus>,
}

pub(crate) fn unit(random: &Random) -> cluster::Unit {
    let random = random.clone();
    Arc::new(move || random.unit())
}

/// Starts the watch of the node `name`.
pub(crate) fn start(name: &str, source: Arc<dyn Collection<Node>>, random: &Random, tasks: &Tasks) -> NodeObject {
    let (reflector, deltas, status) = Reflector::new(source, Scope::named(None, name), 4, unit(random));
    let (synced_out, synced) = watch::channel(false);
    let object = NodeObject { node: watch::Sender::new(None), synced, reflector: status };
    tasks.spawn(reflector.run(tasks.stop().clone()));
    tasks.spawn(follow(deltas, object.node.clone(), synced_out));
    object
}

/// Ends when the reflector does.
async fn follow(
    mut deltas: mpsc::Receiver<Delta<Node>>,
    node: watch::Sender<Option<Arc<Node>>>,
    synced: watch::Sender<bool>,
) {
    while let Some(delta) = deltas.recv().await {
        match delta {
            Delta::Snapshot(list) => {
                let newest = list.into_iter().next().map(Arc::new);
                node.send_if_modified(|known| {
                    // An own write may be newer than the picture.
                    let keep = matches!((&known, &newest), (Some(k), Some(n)) if is_newer(k, n));
                    let changed = !keep && *known != newest;
                    if changed {
                        *known = newest;
                    }
                    changed
                });
                synced.send_replace(true);
            }
            Delta::Upsert(fresh) => {
                node.send_if_modified(|known| {
                    let stale = known.as_ref().is_some_and(|k| is_newer(k, &fresh));
                    if !stale {
                        *known = Some(Arc::new(fresh));
                    }
                    !stale
                });
            }
            Delta::Remove(key) => {
                remove(&node, Some(&key.uid));
            }
        }
    }
}

/// Forgets the object if it still is the one with this uid.
fn remove(node: &watch::Sender<Option<Arc<Node>>>, uid: Option<&String>) {
    node.send_if_modified(|known| {
        let same = known.as_ref().is_some_and(|k| k.metadata.uid.as_ref() == uid);
        if same {
            *known = None;
        }
        same
    });
}

/// True when `a` is the same object in a later version. Resource versions are numbers (KEP-5504); of others none is later.
fn is_newer(a: &Node, b: &Node) -> bool {
    let versions = version_of(&a.metadata).zip(version_of(&b.metadata));
    a.metadata.uid == b.metadata.uid && versions.is_some_and(|(a, b)| a > b)
}

impl NodeObject {
    /// How its watch is doing.
    pub(crate) fn watching(&self) -> watch::Receiver<ReflectorStatus> {
        self.reflector.clone()
    }

    /// The object as it comes in.
    pub(crate) fn node(&self) -> watch::Receiver<Option<Arc<Node>>> {
        self.node.subscribe()
    }

    /// The object as it is known now.
    pub(crate) fn newest(&self) -> Option<Arc<Node>> {
        self.node.borrow().clone()
    }

    /// Waits for the first picture.
    pub(crate) async fn first_picture(&self) {
        // A sender that is gone means that the agent ends.
        let _ = self.synced.clone().wait_for(|synced| *synced).await;
    }

    /// True when there certainly was no such object a moment ago.
    pub(crate) fn is_absent(&self) -> bool {
        *self.synced.borrow() && self.reflector.borrow().watching && self.node.borrow().is_none()
    }

    /// Takes in the answer to a write or a read, unless a newer one is known. One that comes too late, after the object's end, is
    /// found out by the next request (404, see [`Self::gone`]).
    pub(crate) fn offer(&self, node: Node) {
        self.node.send_if_modified(|known| {
            let take = known.as_ref().is_none_or(|k| is_newer(&node, k));
            if take {
                *known = Some(Arc::new(node));
            }
            take
        });
    }

    /// The API server says that this object is not there.
    pub(crate) fn gone(&self, node: &Node) {
        remove(&self.node, node.metadata.uid.as_ref());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::node;

    #[tokio::test]
    async fn the_newest_version_stays_whoever_brings_it() {
        let (deltas, receiver) = mpsc::channel(4);
        let (out, mut synced) = watch::channel(false);
        let object = NodeObject {
            node: watch::Sender::new(None),
            synced: out.subscribe(),
            reflector: watch::channel(ReflectorStatus { watching: true, ..ReflectorStatus::default() }).1,
        };
        let version = |o: &NodeObject| o.newest().and_then(|n| n.metadata.resource_version.clone());
        let follower = tokio::spawn(follow(receiver, object.node.clone(), out));
        assert!(!object.is_absent(), "nothing is known yet");
        deltas.send(Delta::Snapshot(vec![])).await.unwrap();
        synced.changed().await.unwrap();
        assert!(object.is_absent());

        object.offer(node("n", "u1", "7"));
        object.offer(node("n", "u1", "5"));
        assert_eq!(version(&object).as_deref(), Some("7"));
        deltas.send(Delta::Upsert(node("n", "u1", "6"))).await.unwrap();
        deltas.send(Delta::Upsert(node("n", "u1", "8"))).await.unwrap();
        let mut seen = object.node();
        seen.wait_for(|n| n.as_ref().is_some_and(|n| n.metadata.resource_version.as_deref() == Some("8")))
            .await
            .unwrap();

        // What cannot be compared is taken as it comes from the watch.
        deltas.send(Delta::Upsert(node("n", "u1", "x8"))).await.unwrap();
        deltas.send(Delta::Upsert(node("n", "u1", "x9"))).await.unwrap();
        seen.wait_for(|n| n.as_ref().is_some_and(|n| n.metadata.resource_version.as_deref() == Some("x9")))
            .await
            .unwrap();

        // Another object of the same name.
        deltas.send(Delta::Upsert(node("n", "u2", "9"))).await.unwrap();
        seen.wait_for(|n| n.as_ref().is_some_and(|n| n.metadata.uid.as_deref() == Some("u2"))).await.unwrap();
        object.gone(&node("n", "u1", "8"));
        assert_eq!(version(&object).as_deref(), Some("9"));
        object.gone(&node("n", "u2", "9"));
        assert!(object.is_absent());
        drop(deltas);
        follower.await.unwrap();
    }
}
