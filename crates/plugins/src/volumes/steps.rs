//! Carrying out one step of a volume: disk, objects of the API server, driver. Nothing is decided here but what the step's failure means.

use std::collections::BTreeMap;
use std::path::Path;

use decide::admission::matches_selector;
use decide::csi::{self, CsiVolume, DriverRules, FsGroup, ResizeNews, SecretName};
use decide::selinux::{Counted, Wanted};
use decide::volumes::{Stand, Step};
use host::mount;
use model::pod::PodUid;
use tracing::warn;

use super::layout::{DATA, Identity, Layout, remove_dir, remove_file, write};
use super::{Shared, Wish, blocking};
use crate::csi::{Capabilities, Context, Driver, expand_request, publish_request, stage_request};
use crate::wire::RpcError;
use crate::wire::csi_v1::{NodeUnpublishVolumeRequest, NodeUnstageVolumeRequest};

/// A step to be carried out.
pub(crate) struct Job {
    pub(crate) step: Step,
    /// The volume, under the name that this pod's part has.
    pub(crate) of: Identity,
    pub(crate) uid: Option<PodUid>,
    /// The wish that it is done for; None when it undoes something.
    pub(crate) wish: Option<Wish>,
    /// What stood before.
    pub(crate) prior: Stand,
    /// Other pods have it.
    pub(crate) shared: bool,
}

/// How a step went well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Plain,
    Staged {
        label: Option<String>,
    },
    Published {
        republish: bool,
        label: Option<String>,
        relabel: bool,
        /// What the pod's containers want, whatever it was mounted with.
        wanted: Wanted<String>,
    },
    /// It stands on the node with another SELinux label: nothing was done.
    OtherLabel,
    Attach {
        required: bool,
        attached: bool,
    },
}

/// What a failure says of the driver's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// It was not asked.
    Before,
    /// It did nothing.
    Refused,
    /// It may have done it.
    Unknown,
}

/// How a step failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failed {
    pub(crate) kind: Kind,
    pub(crate) reason: &'static str,
    pub(crate) message: String,
}

/// The call that a step waits for, for people.
pub(crate) fn call(step: &Step) -> &'static str {
    match step {
        Step::AwaitAttachment => "the API server",
        Step::Stage => "NodeStageVolume",
        Step::Publish(_) => "NodePublishVolume",
        Step::Expand => "NodeExpandVolume",
        Step::Unpublish(_) => "NodeUnpublishVolume",
        Step::Unstage => "NodeUnstageVolume",
    }
}

/// Messages of one step.
#[derive(Clone, Copy)]
pub(super) struct Words<'a> {
    pub(super) of: &'a Identity,
    pub(super) stage: &'static str,
    pub(super) reason: &'static str,
}

impl<'a> Words<'a> {
    /// Of a step that has one name for block volumes and another one for mounted ones.
    pub(super) fn by_mode(of: &'a Identity, block: &'static str, mounted: &'static str) -> Self {
        match of.block {
            true => Self { of, stage: block, reason: "FailedMapVolume" },
            false => Self { of, stage: mounted, reason: "FailedMount" },
        }
    }

    pub(super) fn failed(&self, kind: Kind, text: impl std::fmt::Display) -> Failed {
        let message = format!("{} failed for volume \"{}\" : {text}", self.stage, self.of.spec_name);
        Failed { kind, reason: self.reason, message }
    }

    pub(super) fn before(&self, text: impl std::fmt::Display) -> Failed {
        self.failed(Kind::Before, text)
    }

    fn rpc(&self, e: &RpcError) -> Failed {
        self.failed(if e.is_final() { Kind::Refused } else { Kind::Unknown }, e)
    }
}

/// Carries out the step. Cancel safe: what was begun is on disk.
pub(crate) async fn run(shared: &Shared, job: &Job) -> Result<Outcome, Failed> {
    if job.of.dir.is_some() {
        return super::disks::run(shared, job).await;
    }
    match (&job.step, &job.uid, &job.wish) {
        (Step::AwaitAttachment, ..) => attach(shared, job).await,
        (Step::Stage, _, Some(wish)) => stage(shared, job, wish).await,
        (Step::Publish(_), Some(uid), Some(wish)) => publish(shared, job, uid, wish).await,
        (Step::Expand, Some(uid), Some(wish)) => expand(shared, job, uid, wish).await,
        (Step::Unpublish(_), Some(uid), _) => unpublish(shared, job, uid).await,
        (Step::Unstage, ..) => unstage(shared, job).await,
        // The plan holds back what no wish is known of.
        _ => Ok(Outcome::Plain),
    }
}

async fn attach(shared: &Shared, job: &Job) -> Result<Outcome, Failed> {
    let words = Words { of: &job.of, stage: "MountVolume.WaitForAttach", reason: "FailedMount" };
    let rules = shared.objects.rules(&job.of.driver).await.map_err(|e| words.before(e))?;
    let required = rules.attach_required();
    Ok(Outcome::Attach { required, attached: !required || shared.is_attached(&job.of.in_status()) })
}

/// True when a volume is not attached because the node can take no more of its driver's. The driver is asked then how many it can take. Only of
/// drivers that set a period for that: others' limits never change, and what a failure says of them is not known.
pub(crate) async fn is_exhausted(shared: &Shared, of: &Identity) -> bool {
    let asks = shared.objects.rules(&of.driver).await.is_ok_and(|rules| rules.limit_period().is_some());
    if !asks {
        return false;
    }
    let name = csi::attachment_name(&of.handle, &of.driver, &shared.layout.node);
    let exhausted = shared.objects.attachment(&name).await.is_ok_and(|found| found.exhausted);
    if exhausted && let Err(e) = shared.drivers.refresh(&of.driver).await {
        warn!(driver = of.driver, err = e, "Driver does not say how many volumes it can take");
    }
    exhausted
}

/// The volume may be used on this node.
pub(super) fn right_node(shared: &Shared, volume: &CsiVolume, words: &Words<'_>) -> Result<(), Failed> {
    if let (Some(wanted), Some(labels)) = (&volume.affinity, shared.labels())
        && !matches_selector(wanted, &labels, &shared.layout.node)
    {
        let stage = if volume.block { "MapVolume.NodeAffinity check" } else { "MountVolume.NodeAffinity check" };
        let words = Words { of: words.of, stage, reason: "FailedMount" };
        return Err(words.before("no matching NodeSelectorTerms"));
    }
    Ok(())
}

/// The label to mount with.
pub(super) fn label(
    shared: &Shared,
    of: &Identity,
    volume: &CsiVolume,
    rules: &DriverRules,
    words: &Words<'_>,
) -> Result<Option<String>, Failed> {
    match rules.label(volume) {
        Ok(label) => Ok(label.map(str::to_owned)),
        Err(e) => {
            shared.count_label(of, volume, Counted::PodMismatch { refused: true });
            Err(words.before(e))
        }
    }
}

/// What both mounting steps need: the node is right, the driver there, the attachment's data and the secret at hand.
async fn gather(
    shared: &Shared,
    volume: &CsiVolume,
    rules: &DriverRules,
    secret: Option<&SecretName>,
    (words, getting, secret_ref): (&Words<'_>, &str, &str),
) -> Result<(std::sync::Arc<Driver>, Context), Failed> {
    right_node(shared, volume, words)?;
    let driver =
        shared.drivers.get(&volume.driver).map_err(|e| words.before(format!("kubernetes.io/csi: {getting}: {e}")))?;
    let mut context = Context::default();
    if volume.lifecycle == csi::Lifecycle::Persistent && rules.attach_required() {
        context.publish = attachment(shared, volume, words.of).await?;
    }
    context.capabilities = driver.calls.capabilities().await.map_err(|e| words.before(e))?;
    if let Some(name) = secret {
        context.secrets = shared.objects.secret(name).await.map_err(|e| {
            let SecretName { namespace, name } = name;
            words.before(format!(
                "fetching {secret_ref} {namespace}/{name} failed: kubernetes.io/csi: failed to find the secret {name} in the \
                 namespace {namespace} with error: {e}"
            ))
        })?;
    }
    Ok((driver, context))
}

async fn attachment(shared: &Shared, volume: &CsiVolume, of: &Identity) -> Result<BTreeMap<String, String>, Failed> {
    let words = Words::by_mode(of, "MapVolume.WaitForAttach", "MountVolume.WaitForAttach");
    let handle = &volume.handle;
    let name = csi::attachment_name(handle, &volume.driver, &shared.layout.node);
    let found = shared
        .objects
        .attachment(&name)
        .await
        .map_err(|e| words.before(format!("volume {handle} has GET error for volume attachment {name}: {e}")))?;
    if found.is_going {
        return Err(words.before("volume attachment is being deleted"));
    }
    if !found.attached {
        return Err(words.before(format!("volume {handle} is not attached for volume attachment {name}")));
    }
    Ok(found.metadata)
}

async fn stage(shared: &Shared, job: &Job, wish: &Wish) -> Result<Outcome, Failed> {
    let (of, volume) = (&job.of, &wish.volume);
    let words = Words::by_mode(of, "MapVolume.SetUpDevice", "MountVolume.MountDevice");
    let rules = shared.objects.rules(&volume.driver).await.map_err(|e| words.before(e))?;
    let getting = if of.block {
        "blockMapper.SetUpDevice failed to get CSI client"
    } else {
        "attacher.MountDevice failed to create newCsiDriverClient"
    };
    let about = (&words, getting, "NodeStageSecretRef");
    let (driver, mut context) = gather(shared, volume, &rules, volume.stage_secret.as_ref(), about).await?;
    if let FsGroup::Delegate(group) = rules.fs_group(volume, fs_group(wish), context.capabilities.group) {
        context.group = Some(group);
    }
    if !context.capabilities.stage && !of.block {
        // Nothing of it will be on the node but the pods' parts. (Of a block volume these have their data here.)
        return Ok(Outcome::Plain);
    }
    context.label = label(shared, of, volume, &rules, &words)?;
    let label = context.label.clone();
    let (layout, identity) = (shared.layout.clone(), Identity { label: label.clone(), ..of.clone() });
    let staging = layout.staging(of).display().to_string();
    blocking(move || {
        let data = layout.device_data(&identity);
        for dir in [data.parent(), Some(&*layout.staging(&identity))].into_iter().flatten() {
            host::fsx::ensure_dirs(dir, 0o750)?;
        }
        write(&data, &layout.device_content(&identity))
    })
    .await
    .map_err(|e| words.failed(Kind::Unknown, e))?;
    if !context.capabilities.stage {
        return Ok(Outcome::Plain);
    }
    let called = driver.calls.stage(stage_request(volume, &context, &staging)).await;
    let Err(e) = called else { return Ok(Outcome::Staged { label }) };
    let failed = words.rpc(&e);
    if failed.kind == Kind::Refused && job.prior == Stand::Absent {
        let (layout, identity) = (shared.layout.clone(), of.clone());
        // What cannot be removed may stand: then it is undone before it is forgotten.
        if blocking(move || remove_device(&layout, &identity)).await.is_err() {
            return Err(Failed { kind: Kind::Unknown, ..failed });
        }
    }
    Err(failed)
}

pub(super) fn fs_group(wish: &Wish) -> Option<i64> {
    wish.pod.spec().security_context.as_ref()?.fs_group
}

/// The tokens that the driver wants, as one attribute or secret.
async fn tokens(shared: &Shared, wish: &Wish, rules: &DriverRules) -> Result<Option<(String, String)>, String> {
    let mut all = BTreeMap::new();
    for (audience, seconds) in rules.tokens() {
        let (token, ends) = shared.objects.token(&wish.pod, audience, seconds).await?;
        let ends = model::Timestamp::from_second(ends.as_second()).unwrap_or(ends);
        all.insert(audience, serde_json::json!({"token": token, "expirationTimestamp": ends.to_string()}));
    }
    if all.is_empty() {
        return Ok(None);
    }
    let text = serde_json::to_string(&all).map_err(|e| e.to_string())?;
    Ok(Some(("csi.storage.k8s.io/serviceAccount.tokens".to_owned(), text)))
}

async fn publish(shared: &Shared, job: &Job, uid: &PodUid, wish: &Wish) -> Result<Outcome, Failed> {
    let (of, volume) = (&job.of, &wish.volume);
    let words = Words::by_mode(of, "MapVolume.MapPodDevice", "MountVolume.SetUp");
    let rules = shared.objects.rules(&volume.driver).await.map_err(|e| words.before(e))?;
    if !of.block {
        rules.check_lifecycle(&volume.driver, volume.lifecycle).map_err(|e| {
            words.before(format!("kubernetes.io/csi: mounter.SetupAt failed to check volume lifecycle mode: {e}"))
        })?;
    }
    let getting = if of.block {
        "blockMapper.MapPodDevice failed to get CSI client"
    } else {
        "mounter.SetUpAt failed to get CSI client"
    };
    let about = (&words, getting, "NodePublishSecretRef");
    let (driver, mut context) = gather(shared, volume, &rules, volume.publish_secret.as_ref(), about).await?;
    context.attributes = rules.pod_attributes(&wish.pod, volume.lifecycle);
    let token = if of.block { Ok(None) } else { tokens(shared, wish, &rules).await };
    let token = token.map_err(|e| {
        words.before(format!("kubernetes.io/csi: mounter.SetUpAt failed to get service accoount token attributes: {e}"))
    })?;
    if let Some((key, value)) = token {
        let into = if rules.tokens_in_secrets() { &mut context.secrets } else { &mut context.attributes };
        into.insert(key, value);
    }
    let group = rules.fs_group(volume, fs_group(wish), context.capabilities.group);
    if let FsGroup::Delegate(group) = group {
        context.group = Some(group);
    }
    context.label = label(shared, of, volume, &rules, &words)?;
    if context.capabilities.stage
        && of.lifecycle == csi::Lifecycle::Persistent
        && !of.block
        && context.label != of.label
    {
        // One that stands keeps its label for as long as its pod lives; what was begun may stand, and is made sure of.
        if job.prior == Stand::Absent {
            if !job.shared {
                return Ok(Outcome::OtherLabel);
            }
            shared.count_label(of, volume, Counted::VolumeMismatch { refused: true });
            let text = |label: &Option<String>| label.clone().unwrap_or_default();
            let (old, new) = (text(&of.label), text(&context.label));
            return Err(
                words.before(format!("conflicting SELinux labels of volume {}: \"{old}\" and \"{new}\"", of.spec_name))
            );
        }
        context.label.clone_from(&of.label);
    }
    let label = context.label.clone();
    let staged = job.wish.as_ref().is_some_and(|w| w.volume.lifecycle == csi::Lifecycle::Persistent);
    let staging = if staged && context.capabilities.stage {
        shared.layout.staging(of).display().to_string()
    } else {
        String::new()
    };
    let target = shared.layout.target(of, uid).display().to_string();
    let (layout, pod) = (shared.layout.clone(), uid.clone());
    let identity = Identity { label: label.clone(), ..of.clone() };
    blocking(move || {
        let dir = layout.pod_dir(&identity, &pod);
        host::fsx::ensure_dirs(&dir, 0o750)?;
        // The data of a block volume are the node's.
        if identity.block { Ok(()) } else { write(&dir.join(DATA), &layout.pod_content(&identity)) }
    })
    .await
    .map_err(|e| words.failed(Kind::Unknown, e))?;
    if let Err(e) = driver.calls.publish(publish_request(volume, &context, &staging, &target)).await {
        let failed = words.rpc(&e);
        if failed.kind == Kind::Refused && job.prior == Stand::Absent {
            let (layout, identity, pod) = (shared.layout.clone(), of.clone(), uid.clone());
            if blocking(move || remove_pod_part(&layout, &identity, &pod)).await.is_err() {
                return Err(Failed { kind: Kind::Unknown, ..failed });
            }
        }
        return Err(failed);
    }
    let again = job.prior == Stand::Done;
    if of.block {
        let (layout, identity, pod) = (shared.layout.clone(), of.clone(), uid.clone());
        let map = Words { stage: "MapVolume.MapBlockVolume", ..words };
        let mapped = blocking(move || map_device(&layout, &identity, &pod, &layout.target(&identity, &pod)));
        mapped.await.map_err(|e| map.failed(Kind::Unknown, e))?;
        if !again {
            tell_mapped(shared, of, uid, wish);
        }
    }
    if let (FsGroup::Change(group), false) = (group, again) {
        let context = wish.pod.spec().security_context.as_ref();
        let on_mismatch = context.and_then(|c| c.fs_group_change_policy.as_deref()) == Some("OnRootMismatch");
        let (target, handle) = (shared.layout.target(of, uid), &volume.handle);
        blocking(move || {
            let group = u32::try_from(group)?;
            Ok(host::fsx::set_fs_group(&target, group, false, on_mismatch)?)
        })
        .await
        .map_err(|e| words.failed(Kind::Unknown, format!("applyFSGroup failed for vol {handle}: {e}")))?;
    }
    let relabel = shared.selinux && label.is_none() && !of.block && {
        let (proc, target) = (shared.layout.proc.clone(), shared.layout.target(of, uid));
        let table =
            blocking(move || Ok(mount::MountTable::read(&proc)?)).await.map_err(|e| words.failed(Kind::Unknown, e))?;
        table.at(&mount::real(&target)).is_some_and(|m| m.has_labels())
    };
    let wanted = rules.wanted_label(volume).to_owned();
    Ok(Outcome::Published { republish: rules.republish(), label, relabel, wanted })
}

/// Tells that a pod has a block volume.
pub(super) fn tell_mapped(shared: &Shared, of: &Identity, uid: &PodUid, wish: &Wish) {
    let paths = [("globalMapPath", shared.layout.held(of, uid)), ("volumeMapPath", shared.layout.link(of, uid))];
    for (what, path) in paths {
        let path = path.parent().unwrap_or(&path).display();
        let message = format!("MapVolume.MapPodDevice succeeded for volume \"{}\" {what} \"{path}\"", of.spec_name);
        shared.objects.event(&wish.pod, None, false, "SuccessfulMountVolume", &message);
    }
}

/// What the driver's answer means for the growth: it can never be done so.
fn is_infeasible(code: i32) -> bool {
    use tonic::Code;
    [Code::InvalidArgument, Code::OutOfRange, Code::NotFound].contains(&Code::from_i32(code))
}

async fn expand(shared: &Shared, job: &Job, uid: &PodUid, wish: &Wish) -> Result<Outcome, Failed> {
    let (of, volume) = (&job.of, &wish.volume);
    let words = Words { of, stage: "NodeExpandVolume.NodeExpandVolume", reason: "VolumeResizeFailed" };
    let Some(growth) = &volume.growth else { return Ok(Outcome::Plain) };
    if volume.read_only {
        let name = &of.spec_name;
        let text = format!("MountVolume.NodeExpandVolume failed for volume \"{name}\" requested read-only file system");
        shared.objects.event(&wish.pod, Some(growth), true, "FileSystemResizeFailed", &text);
        return Ok(Outcome::Plain);
    }
    let about = (&words, "Expander.NodeExpand failed to get CSI client", "NodeExpandSecretRef");
    // The attachment is not asked for: its data are no part of this call.
    let rules = DriverRules(Some(Default::default()));
    let no_attachment = CsiVolume { lifecycle: csi::Lifecycle::Ephemeral, ..volume.clone() };
    let (driver, context) = gather(shared, &no_attachment, &rules, volume.expand_secret.as_ref(), about).await?;
    if !context.capabilities.expand {
        return Ok(Outcome::Plain);
    }
    let resized = async |news: ResizeNews| {
        let told = shared.objects.resized(&wish.pod, growth, &news).await;
        told.map_err(|e| words.failed(Kind::Unknown, format!("update pvc status failed: {e}")))
    };
    resized(ResizeNews::Begun).await?;
    let Capabilities { stage, .. } = context.capabilities;
    let staging = if stage { shared.layout.staging(of).display().to_string() } else { String::new() };
    let path = shared.layout.target(of, uid).display().to_string();
    let request = expand_request(volume, &context, &staging, &path, growth.wanted);
    if let Err(e) = driver.calls.expand(request).await {
        let failed = words.failed(words.rpc(&e).kind, format!("Expander.NodeExpand failed to expand the volume : {e}"));
        if !e.is_final() {
            return Err(failed);
        }
        let message = format!("Expander.NodeExpand failed to expand the volume : {e}");
        let infeasible = is_infeasible(e.code);
        // What cannot be told is told with the next try.
        let _ = resized(if infeasible { ResizeNews::Infeasible(message) } else { ResizeNews::Failed(message) }).await;
        if infeasible || e.code == tonic::Code::FailedPrecondition as i32 {
            // Another try on this node would end as this one: the controller's next size will be another growth.
            shared.objects.event(&wish.pod, None, true, failed.reason, &failed.message);
            return Ok(Outcome::Plain);
        }
        return Err(failed);
    }
    resized(ResizeNews::Done).await?;
    let message =
        format!("MountVolume.NodeExpandVolume succeeded for volume \"{}\" {}", of.spec_name, shared.layout.node);
    shared.objects.event(&wish.pod, Some(growth), false, "FileSystemResizeSuccessful", &message);
    Ok(Outcome::Plain)
}

async fn unpublish(shared: &Shared, job: &Job, uid: &PodUid) -> Result<Outcome, Failed> {
    let of = &job.of;
    let words = Words::by_mode(of, "UnmapVolume.UnmapPodDevice", "UnmountVolume.TearDown");
    let getting = "kubernetes.io/csi: Unmounter.TearDownAt failed to get CSI client";
    let driver = shared.drivers.get(&of.driver).map_err(|e| words.before(format!("{getting}: {e}")))?;
    if of.block {
        let (layout, identity, pod) = (shared.layout.clone(), of.clone(), uid.clone());
        blocking(move || unmap_device(&layout, &identity, &pod)).await.map_err(|e| words.before(e))?;
    }
    let request = NodeUnpublishVolumeRequest {
        volume_id: of.handle.clone(),
        target_path: shared.layout.target(of, uid).display().to_string(),
    };
    driver.calls.unpublish(request).await.map_err(|e| words.rpc(&e))?;
    let (layout, identity, pod) = (shared.layout.clone(), of.clone(), uid.clone());
    let removed = blocking(move || remove_pod_part(&layout, &identity, &pod)).await;
    removed.map_err(|e| words.failed(Kind::Unknown, e))?;
    Ok(Outcome::Plain)
}

async fn unstage(shared: &Shared, job: &Job) -> Result<Outcome, Failed> {
    let of = &job.of;
    let words = Words { of, stage: "UnmountDevice", reason: "FailedMount" };
    let getting = "kubernetes.io/csi: attacher.UnmountDevice failed to create newCsiDriverClient";
    let driver = shared.drivers.get(&of.driver).map_err(|e| words.before(format!("{getting}: {e}")))?;
    if driver.calls.capabilities().await.map_err(|e| words.before(e))?.stage {
        let request = NodeUnstageVolumeRequest {
            volume_id: of.handle.clone(),
            staging_target_path: shared.layout.staging(of).display().to_string(),
        };
        driver.calls.unstage(request).await.map_err(|e| words.rpc(&e))?;
    }
    let (layout, identity) = (shared.layout.clone(), of.clone());
    blocking(move || remove_device(&layout, &identity)).await.map_err(|e| words.failed(Kind::Unknown, e))?;
    Ok(Outcome::Plain)
}

type Removal = Result<(), super::Failure>;

/// An error while something is mounted there: it is not for us to remove.
fn not_mounted(layout: &Layout, path: &Path) -> Removal {
    if mount::is_mount_point(&layout.proc, path)? {
        return Err(format!("{} is still mounted", path.display()).into());
    }
    Ok(())
}

/// Removes what the node's part leaves on disk: empty directories and the data file.
fn remove_device(layout: &Layout, of: &Identity) -> Removal {
    let (staging, data) = (layout.staging(of), layout.device_data(of));
    not_mounted(layout, &staging)?;
    match std::fs::symlink_metadata(&staging) {
        Ok(meta) if !meta.is_dir() => remove_file(&staging)?,
        _ => remove_dir(&staging)?,
    }
    if of.block {
        remove_dir(&layout.pod_dir(of, &PodUid::new("")))?;
        let held = layout.held(of, &PodUid::new("x"));
        held.parent().map_or(Ok(()), remove_dir)?;
    }
    remove_file(&data)?;
    let dir = data.parent();
    dir.map_or(Ok(()), remove_dir)?;
    if of.block {
        dir.and_then(Path::parent).map_or(Ok(()), remove_dir)?;
    }
    Ok(())
}

/// Removes what a pod's part leaves on disk.
fn remove_pod_part(layout: &Layout, of: &Identity, uid: &PodUid) -> Removal {
    let target = layout.target(of, uid);
    not_mounted(layout, &target)?;
    match std::fs::symlink_metadata(&target) {
        Ok(meta) if !meta.is_dir() => remove_file(&target)?,
        _ => remove_dir(&target)?,
    }
    if of.block {
        return Ok(());
    }
    let dir = layout.pod_dir(of, uid);
    remove_file(&dir.join(DATA))?;
    remove_dir(&dir)
}

/// Holds a device for the pod, and links it for its containers.
pub(super) fn map_device(layout: &Layout, of: &Identity, uid: &PodUid, device: &Path) -> Removal {
    let (held, link) = (layout.held(of, uid), layout.link(of, uid));
    for dir in [held.parent(), link.parent()].into_iter().flatten() {
        host::fsx::ensure_dirs(dir, 0o750)?;
    }
    if !mount::is_mount_point(&layout.proc, &held)? {
        host::fsx::ensure_file(&held, 0o660)?;
        mount::bind(device, &held, false)?;
    }
    match std::fs::read_link(&link) {
        Ok(there) if there == device => return Ok(()),
        Ok(_) => remove_file(&link)?,
        Err(_) => {}
    }
    Ok(std::os::unix::fs::symlink(device, &link)?)
}

/// Undoes [`map_device`].
pub(super) fn unmap_device(layout: &Layout, of: &Identity, uid: &PodUid) -> Removal {
    let (held, link) = (layout.held(of, uid), layout.link(of, uid));
    remove_file(&link)?;
    if let Some(dir) = link.parent() {
        // Other volumes of the pod may be linked there.
        let _ = remove_dir(dir);
    }
    while mount::is_mount_point(&layout.proc, &held)? {
        mount::unmount(&held)?;
    }
    remove_file(&held)
}
