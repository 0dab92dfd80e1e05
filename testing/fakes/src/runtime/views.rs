//! The runtime's memory as CRI messages.

use std::collections::BTreeMap;

use cri_api::v1;
use cri_api::v1::{ContainerState, PodSandboxState};
use rand::seq::SliceRandom;

use super::state::{Container, Sandbox, State};

pub(crate) fn namespaces(config: &v1::PodSandboxConfig) -> Option<&v1::NamespaceOption> {
    config.linux.as_ref()?.security_context.as_ref()?.namespace_options.as_ref()
}

fn selected(selector: &BTreeMap<String, String>, labels: &BTreeMap<String, String>) -> bool {
    selector.iter().all(|(key, value)| labels.get(key) == Some(value))
}

/// Empty means any.
fn fits(wanted: &str, id: &str) -> bool {
    wanted.is_empty() || wanted == id
}

impl Sandbox {
    fn state(&self) -> PodSandboxState {
        if self.ready { PodSandboxState::SandboxReady } else { PodSandboxState::SandboxNotready }
    }

    fn item(&self) -> v1::PodSandbox {
        v1::PodSandbox {
            id: self.id.clone(),
            metadata: self.config.metadata.clone(),
            state: self.state().into(),
            created_at: self.created_at,
            labels: self.config.labels.clone(),
            annotations: self.config.annotations.clone(),
            runtime_handler: self.handler.clone(),
        }
    }

    pub(crate) fn status(&self) -> v1::PodSandboxStatus {
        let options = namespaces(&self.config).cloned();
        v1::PodSandboxStatus {
            id: self.id.clone(),
            metadata: self.config.metadata.clone(),
            state: self.state().into(),
            created_at: self.created_at,
            // containerd forgets the address together with the network namespace.
            network: Some(v1::PodSandboxNetworkStatus {
                ip: if self.ready { self.ip.clone() } else { String::new() },
                additional_ips: vec![],
            }),
            linux: Some(v1::LinuxPodSandboxStatus { namespaces: Some(v1::Namespace { options }) }),
            labels: self.config.labels.clone(),
            annotations: self.config.annotations.clone(),
            runtime_handler: self.handler.clone(),
        }
    }
}

impl State {
    pub(crate) fn list_sandboxes(&mut self, filter: Option<&v1::PodSandboxFilter>) -> Vec<v1::PodSandbox> {
        let mut list: Vec<_> = self
            .sandboxes
            .values()
            .filter(|s| {
                filter.is_none_or(|f| {
                    fits(&f.id, &s.id)
                        && f.state.as_ref().is_none_or(|state| state.state() == s.state())
                        && selected(&f.label_selector, &s.config.labels)
                })
            })
            .map(Sandbox::item)
            .collect();
        // The interface promises no order.
        list.shuffle(&mut self.random);
        list
    }

    pub(crate) fn list_containers(&mut self, filter: Option<&v1::ContainerFilter>) -> Vec<v1::Container> {
        let mut list: Vec<_> = self
            .containers
            .values()
            .filter(|c| {
                filter.is_none_or(|f| {
                    fits(&f.id, &c.id)
                        && fits(&f.pod_sandbox_id, &c.sandbox)
                        && f.state.as_ref().is_none_or(|state| state.state() == c.state)
                        && selected(&f.label_selector, &c.config.labels)
                })
            })
            .map(|c| self.container_item(c))
            .collect();
        list.shuffle(&mut self.random);
        list
    }

    pub(crate) fn container_item(&self, c: &Container) -> v1::Container {
        v1::Container {
            id: c.id.clone(),
            pod_sandbox_id: c.sandbox.clone(),
            metadata: c.config.metadata.clone(),
            image: c.config.image.clone(),
            image_ref: c.image_id.clone(),
            state: c.state.into(),
            created_at: c.created_at,
            labels: c.config.labels.clone(),
            annotations: c.config.annotations.clone(),
            image_id: c.image_id.clone(),
        }
    }

    pub(crate) fn container_status(&self, c: &Container) -> v1::ContainerStatus {
        let image = self.images.local.get(&c.image_id);
        let named = image.and_then(|image| image.repo_tags.first().or(image.repo_digests.first()));
        let linux = c.config.linux.as_ref();
        let security = linux.and_then(|linux| linux.security_context.as_ref());
        let number = |value: Option<&v1::Int64Value>| value.map(|value| value.value);
        let user = v1::LinuxContainerUser {
            uid: number(security.and_then(|s| s.run_as_user.as_ref()))
                .or(number(image.and_then(|image| image.uid.as_ref())))
                .unwrap_or(0),
            gid: number(security.and_then(|s| s.run_as_group.as_ref())).unwrap_or(0),
            supplemental_groups: security.map(|s| s.supplemental_groups.clone()).unwrap_or_default(),
        };
        v1::ContainerStatus {
            id: c.id.clone(),
            metadata: c.config.metadata.clone(),
            state: c.state.into(),
            created_at: c.created_at,
            started_at: c.started_at,
            finished_at: c.finished_at,
            exit_code: c.exit_code,
            image: Some(v1::ImageSpec {
                image: named.cloned().unwrap_or_else(|| c.image_id.clone()),
                ..Default::default()
            }),
            image_ref: image
                .and_then(|image| image.repo_digests.first())
                .cloned()
                .unwrap_or_else(|| c.image_id.clone()),
            reason: c.reason.clone(),
            message: c.message.clone(),
            labels: c.config.labels.clone(),
            annotations: c.config.annotations.clone(),
            mounts: c.config.mounts.clone(),
            log_path: c.log_path.clone(),
            resources: linux.map(|linux| v1::ContainerResources { linux: linux.resources.clone(), windows: None }),
            image_id: c.image_id.clone(),
            user: Some(v1::ContainerUser { linux: Some(user) }),
            stop_signal: c.config.stop_signal,
        }
    }

    pub(crate) fn statuses_of(&self, sandbox: &str) -> Vec<v1::ContainerStatus> {
        self.containers.values().filter(|c| c.sandbox == sandbox).map(|c| self.container_status(c)).collect()
    }

    pub(crate) fn list_images(&mut self, filter: Option<&v1::ImageFilter>) -> Vec<v1::Image> {
        let wanted =
            filter.and_then(|filter| filter.image.as_ref()).map(|image| image.image.as_str()).unwrap_or_default();
        if !wanted.is_empty() {
            return self.images.find(wanted).cloned().into_iter().collect();
        }
        let mut list: Vec<_> = self.images.local.values().cloned().collect();
        list.shuffle(&mut self.random);
        list
    }

    // ---- Usage figures: every container uses a hundredth of a CPU and 1 MiB.

    fn cpu(&self, time: std::time::Duration, users: u64) -> v1::CpuUsage {
        v1::CpuUsage {
            timestamp: self.nanos(self.now),
            usage_core_nano_seconds: Some(v1::UInt64Value { value: time.as_nanos() as u64 / 100 }),
            usage_nano_cores: Some(v1::UInt64Value { value: users * 10_000_000 }),
            psi: None,
        }
    }

    fn memory(&self, users: u64) -> v1::MemoryUsage {
        let bytes = || Some(v1::UInt64Value { value: users << 20 });
        v1::MemoryUsage {
            timestamp: self.nanos(self.now),
            working_set_bytes: bytes(),
            usage_bytes: bytes(),
            rss_bytes: bytes(),
            ..Default::default()
        }
    }

    pub(crate) fn filesystem(&self, used: u64) -> v1::FilesystemUsage {
        v1::FilesystemUsage {
            timestamp: self.nanos(self.now),
            fs_id: Some(v1::FilesystemIdentifier {
                mountpoint: "/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs".into(),
            }),
            used_bytes: Some(v1::UInt64Value { value: used }),
            inodes_used: Some(v1::UInt64Value { value: used >> 12 }),
        }
    }

    pub(crate) fn container_stats(&self, c: &Container) -> v1::ContainerStats {
        let users = u64::from(c.state == ContainerState::ContainerRunning);
        v1::ContainerStats {
            attributes: Some(v1::ContainerAttributes {
                id: c.id.clone(),
                metadata: c.config.metadata.clone(),
                labels: c.config.labels.clone(),
                annotations: c.config.annotations.clone(),
            }),
            cpu: Some(self.cpu(self.ran_for(c), users)),
            memory: Some(self.memory(users)),
            writable_layer: Some(self.filesystem(24 << 10)),
            ..Default::default()
        }
    }

    pub(crate) fn list_container_stats(&self, filter: Option<&v1::ContainerStatsFilter>) -> Vec<v1::ContainerStats> {
        let running = self.containers.values().filter(|c| c.state == ContainerState::ContainerRunning);
        running
            .filter(|c| {
                filter.is_none_or(|f| {
                    fits(&f.id, &c.id)
                        && fits(&f.pod_sandbox_id, &c.sandbox)
                        && selected(&f.label_selector, &c.config.labels)
                })
            })
            .map(|c| self.container_stats(c))
            .collect()
    }

    pub(crate) fn sandbox_stats(&self, s: &Sandbox) -> v1::PodSandboxStats {
        let containers: Vec<_> = self.containers.values().filter(|c| c.sandbox == s.id && c.live()).collect();
        let users = containers.len() as u64;
        v1::PodSandboxStats {
            attributes: Some(v1::PodSandboxAttributes {
                id: s.id.clone(),
                metadata: s.config.metadata.clone(),
                labels: s.config.labels.clone(),
                annotations: s.config.annotations.clone(),
            }),
            linux: Some(v1::LinuxPodSandboxStats {
                cpu: Some(self.cpu(containers.iter().map(|c| self.ran_for(c)).sum(), users)),
                memory: Some(self.memory(users)),
                process: Some(v1::ProcessUsage {
                    timestamp: self.nanos(self.now),
                    process_count: Some(v1::UInt64Value { value: users + 1 }),
                }),
                containers: containers.into_iter().map(|c| self.container_stats(c)).collect(),
                ..Default::default()
            }),
            windows: None,
        }
    }

    pub(crate) fn list_sandbox_stats(&self, filter: Option<&v1::PodSandboxStatsFilter>) -> Vec<v1::PodSandboxStats> {
        let ready = self.sandboxes.values().filter(|s| s.ready);
        ready
            .filter(|s| filter.is_none_or(|f| fits(&f.id, &s.id) && selected(&f.label_selector, &s.config.labels)))
            .map(|s| self.sandbox_stats(s))
            .collect()
    }
}
