//! Answers that lack what every answer must have are errors, as in Go: nothing behind the port has to guess.

use cri_api::v1;

use crate::client::API_VERSION;

/// Checks what Version answered.
///
/// # Errors
/// Says which rule is broken: every field must be filled, and the interface must be version 0.1.0.
pub fn validate_version(answer: &v1::VersionResponse) -> Result<(), String> {
    let v1::VersionResponse { version, runtime_name, runtime_version, runtime_api_version } = answer;
    if [version, runtime_name, runtime_version, runtime_api_version].iter().any(|field| field.is_empty()) {
        return Err(format!(
            "not all fields are set in VersionResponse (version {version:?}, runtime name {runtime_name:?}, \
             runtime version {runtime_version:?}, runtime API version {runtime_api_version:?})"
        ));
    }
    if version != API_VERSION {
        return Err(format!("runtime api version is not supported: {version:?}, expected {API_VERSION:?}"));
    }
    Ok(())
}

/// Fails with this text unless the condition holds.
fn must(condition: bool, text: &str) -> Result<(), String> {
    if condition { Ok(()) } else { Err(text.into()) }
}

pub(crate) fn runtime_status(status: &v1::StatusResponse) -> Result<(), String> {
    let conditions = status.status.as_ref().map_or(0, |status| status.conditions.len());
    must(conditions >= 2, "RuntimeReady or NetworkReady condition are not set")
}

pub(crate) fn sandbox_status(status: Option<&v1::PodSandboxStatus>) -> Result<(), String> {
    let Some(status) = status else {
        return Err("status is not set".into());
    };
    must(!status.id.is_empty(), "status.Id is not set")?;
    let Some(metadata) = &status.metadata else {
        return Err("status.Metadata is not set".into());
    };
    must(
        !metadata.name.is_empty() && !metadata.namespace.is_empty() && !metadata.uid.is_empty(),
        "metadata.Name, metadata.Namespace or metadata.Uid is not in metadata",
    )?;
    must(status.created_at != 0, "status.CreatedAt is not set")
}

pub(crate) fn container_status(status: Option<&v1::ContainerStatus>) -> Result<(), String> {
    let Some(status) = status else {
        return Err("status is not set".into());
    };
    must(!status.id.is_empty(), "status.Id is not set")?;
    let Some(metadata) = &status.metadata else {
        return Err("status.Metadata is not set".into());
    };
    must(!metadata.name.is_empty(), "metadata.Name is not in metadata")?;
    must(status.created_at != 0, "status.CreatedAt is not set")?;
    must(status.image.as_ref().is_some_and(|image| !image.image.is_empty()), "status.Image is not set")?;
    must(!status.image_ref.is_empty(), "status.ImageRef is not set")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version() -> v1::VersionResponse {
        v1::VersionResponse {
            version: "0.1.0".into(),
            runtime_name: "containerd".into(),
            runtime_version: "1.6.20".into(),
            runtime_api_version: "v1".into(),
        }
    }

    #[test]
    fn versions() {
        assert_eq!(validate_version(&version()), Ok(()));
        let other = v1::VersionResponse { version: "0.2.0".into(), ..version() };
        assert!(validate_version(&other).is_err_and(|text| text.contains("0.2.0")));
        for broken in [
            v1::VersionResponse { version: String::new(), ..version() },
            v1::VersionResponse { runtime_name: String::new(), ..version() },
            v1::VersionResponse { runtime_version: String::new(), ..version() },
            v1::VersionResponse { runtime_api_version: String::new(), ..version() },
        ] {
            assert!(validate_version(&broken).is_err_and(|text| text.starts_with("not all fields are set")));
        }
    }

    #[test]
    fn container_statuses() {
        let whole = v1::ContainerStatus {
            id: "a".into(),
            metadata: Some(v1::ContainerMetadata { name: "web".into(), attempt: 0 }),
            created_at: 1,
            image: Some(v1::ImageSpec { image: "busybox".into(), ..Default::default() }),
            image_ref: "sha256:0".into(),
            ..Default::default()
        };
        assert_eq!(container_status(Some(&whole)), Ok(()));
        assert_eq!(container_status(None), Err("status is not set".into()));
        for (broken, text) in [
            (v1::ContainerStatus { id: String::new(), ..whole.clone() }, "status.Id is not set"),
            (v1::ContainerStatus { metadata: None, ..whole.clone() }, "status.Metadata is not set"),
            (v1::ContainerStatus { created_at: 0, ..whole.clone() }, "status.CreatedAt is not set"),
            (v1::ContainerStatus { image: None, ..whole.clone() }, "status.Image is not set"),
            (v1::ContainerStatus { image_ref: String::new(), ..whole.clone() }, "status.ImageRef is not set"),
        ] {
            assert_eq!(container_status(Some(&broken)), Err(text.into()));
        }
    }
}
