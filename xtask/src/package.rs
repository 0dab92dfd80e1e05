//! What a release consists of ([`crate::dist`]), made from one program: a Debian package with the systemd unit that kubeadm expects, an OCI image
//! archive, the bare program, shell completions, a manual page, an SBOM, and checksums of them all.
//!
//! The same program and the same commit give the same bytes: every time stamp is the commit's.

mod completions;
mod manual;
mod sbom;

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::shell::{Shell, read};

/// Commands of the program that have a help text of their own.
const COMMANDS: [&[&str]; 5] = [&["check"], &["pods"], &["explain", "pod"], &["explain", "node"], &["version"]];

/// The help texts of a program.
pub(crate) struct Help {
    /// Of the agent: `rubelet --help`.
    pub(crate) agent: String,
    /// Of each command, by its words.
    pub(crate) commands: Vec<(String, String)>,
}

/// A release in the making.
struct Release<'a> {
    shell: &'a Shell,
    program: PathBuf,
    out: PathBuf,
    version: String,
    /// Of Debian's architectures.
    architecture: String,
    /// Seconds since 1970 of the commit.
    stamp: String,
}

/// Makes everything that a release has into `target/dist`, and gives the files.
///
/// # Errors
/// A tool is missing (dpkg-deb, git, python3, tar), or fails; the program does not run here.
pub(crate) fn make(shell: &Shell, program: &Path) -> Result<Vec<PathBuf>> {
    let out = crate::root().join("target/dist");
    fs::create_dir_all(&out).with_context(|| format!("cannot make {}", out.display()))?;
    // What an earlier run left; the program itself may lie here too.
    for entry in fs::read_dir(&out)?.flatten() {
        if entry.file_name().to_string_lossy().starts_with("rubelet_") {
            fs::remove_file(entry.path())?;
        } else if entry.path().is_dir() {
            fs::remove_dir_all(entry.path())?;
        }
    }
    let program = fs::canonicalize(program).with_context(|| format!("no program {}", program.display()))?;
    let release = Release {
        shell,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        architecture: read(Command::new("dpkg").arg("--print-architecture"))?.trim().to_owned(),
        stamp: read(git().args(["log", "-1", "--format=%ct"]))?.trim().to_owned(),
        program,
        out,
    };
    let help = help(&release.program)?;
    let mut files = vec![release.bare()?, release.sbom()?];
    files.push(release.debian(&help)?);
    files.push(release.image()?);
    files.push(release.checksums(&files)?);
    Ok(files)
}

fn git() -> Command {
    let mut command = Command::new("git");
    command.arg("-C").arg(crate::root());
    command
}

fn help(program: &Path) -> Result<Help> {
    let commands = COMMANDS.map(|words| {
        let text = read(Command::new(program).args(words).arg("--help"))?;
        Ok((words.join(" "), text))
    });
    Ok(Help {
        agent: read(Command::new(program).arg("--help"))?,
        commands: commands.into_iter().collect::<Result<_>>()?,
    })
}

fn write(path: &Path, text: &str, mode: u32) -> Result<()> {
    let dir = path.parent().context("a file without a directory")?;
    fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(mode))?)
}

/// A file of `packaging/`.
fn part(name: &str) -> Result<String> {
    let path = crate::root().join("packaging").join(name);
    fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
}

impl Release<'_> {
    fn run(&self, what: &str, command: &mut Command) -> Result<()> {
        self.shell.need(what, command.env("SOURCE_DATE_EPOCH", &self.stamp), Duration::from_secs(600))
    }

    fn name(&self, kind: &str) -> PathBuf {
        self.out.join(format!("rubelet_{}_{}{kind}", self.version, self.architecture))
    }

    /// An empty directory to put things into.
    fn staging(&self, name: &str) -> Result<PathBuf> {
        let dir = self.out.join(name);
        fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        Ok(dir)
    }

    fn install(&self, root: &Path) -> Result<()> {
        let bin = root.join("usr/bin");
        fs::create_dir_all(&bin)?;
        let to = bin.join("rubelet");
        fs::copy(&self.program, &to).with_context(|| format!("cannot copy {}", self.program.display()))?;
        fs::set_permissions(&to, fs::Permissions::from_mode(0o755))?;
        Ok(symlink("rubelet", bin.join("kubelet"))?)
    }

    /// The program alone, packed.
    fn bare(&self) -> Result<PathBuf> {
        let to = self.name(".tar.gz");
        let dir = self.staging("bare")?;
        fs::copy(&self.program, dir.join("rubelet"))?;
        fs::set_permissions(dir.join("rubelet"), fs::Permissions::from_mode(0o755))?;
        write(&dir.join("LICENSE"), &fs::read_to_string(crate::root().join("LICENSE"))?, 0o644)?;
        let mut tar = Command::new("tar");
        tar.arg("--create").arg("--file").arg(&to).arg("--directory").arg(&dir);
        tar.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--use-compress-program=gzip -9n"]);
        tar.arg(format!("--mtime=@{}", self.stamp)).args(["LICENSE", "rubelet"]);
        self.run("packing the program", &mut tar)?;
        fs::remove_dir_all(dir)?;
        Ok(to)
    }

    fn debian(&self, help: &Help) -> Result<PathBuf> {
        let root = self.staging("deb")?;
        self.install(&root)?;
        let units = root.join("usr/lib/systemd/system");
        write(&units.join("kubelet.service"), &part("kubelet.service")?, 0o644)?;
        write(&units.join("kubelet.service.d/10-kubeadm.conf"), &part("10-kubeadm.conf")?, 0o644)?;
        write(&root.join("etc/default/kubelet"), &part("kubelet.default")?, 0o644)?;
        write(&root.join("usr/share/doc/rubelet/copyright"), &part("debian/copyright")?, 0o644)?;
        for (path, text) in completions::all(help) {
            write(&root.join(path), &text, 0o644)?;
        }
        let manual = root.join("usr/share/man/man8/rubelet.8");
        write(&manual, &manual::page(help, &self.version, &self.stamp), 0o644)?;
        self.run("packing the manual", Command::new("gzip").args(["-9n"]).arg(&manual))?;
        // kubeadm looks for the program of this name, and so do people.
        symlink("rubelet.8.gz", root.join("usr/share/man/man8/kubelet.8.gz"))?;
        let control = root.join("DEBIAN");
        write(&control.join("control"), &self.control(&root)?, 0o644)?;
        write(&control.join("conffiles"), "/etc/default/kubelet\n", 0o644)?;
        for script in ["preinst", "postinst", "prerm", "postrm"] {
            write(&control.join(script), &part(&format!("debian/{script}"))?, 0o755)?;
        }
        let to = self.name(".deb");
        let mut build = Command::new("dpkg-deb");
        build.args(["--root-owner-group", "-Zxz", "--build"]).arg(&root).arg(&to);
        self.run("packing the Debian package", &mut build)?;
        fs::remove_dir_all(root)?;
        Ok(to)
    }

    fn control(&self, root: &Path) -> Result<String> {
        let size = read(Command::new("du").args(["--summarize", "--apparent-size", "--block-size=1024"]).arg(root))?;
        let size = size.split_whitespace().next().unwrap_or("0").to_owned();
        Ok(format!(
            "Package: rubelet\n\
             Version: {}\n\
             Architecture: {}\n\
             Maintainer: rubelet <rubelet@localhost>\n\
             Installed-Size: {size}\n\
             Depends: libc6 (>= {}), libgcc-s1, mount, util-linux\n\
             Recommends: containerd | cri-o, iptables\n\
             Provides: kubelet\n\
             Conflicts: kubelet\n\
             Replaces: kubelet\n\
             Section: admin\n\
             Priority: optional\n\
             Description: Kubernetes node agent\n \
             Takes the pods of this node from an API server, a directory or a URL and keeps their\n \
             containers running. Takes the place of the kubelet, with its flags, configuration and\n \
             files: running containers are taken over.\n",
            self.version,
            self.architecture,
            self.newest_libc()?,
        ))
    }

    /// The newest version of the C library that the program asks for.
    fn newest_libc(&self) -> Result<String> {
        let bytes = fs::read(&self.program)?;
        let text = String::from_utf8_lossy(&bytes);
        let numbers = |v: &str| v.split('.').filter_map(|n| n.parse::<u32>().ok()).collect::<Vec<_>>();
        let found = text.match_indices("GLIBC_2.").map(|(at, _)| {
            let version = &text[at + "GLIBC_".len()..];
            let end = version.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(version.len());
            version[..end].trim_end_matches('.').to_owned()
        });
        // Without one it is a static program.
        Ok(found.max_by_key(|v| numbers(v)).unwrap_or_else(|| "2".into()))
    }

    /// An image with the program and the libraries that it is linked with.
    fn image(&self) -> Result<PathBuf> {
        let root = self.staging("image")?;
        self.install(&root)?;
        for library in libraries(&self.program)? {
            let to = root.join(library.strip_prefix("/").unwrap_or(&library));
            fs::create_dir_all(to.parent().context("a library without a directory")?)?;
            fs::copy(&library, &to).with_context(|| format!("cannot copy {}", library.display()))?;
        }
        let to = self.name(".oci.tar");
        let mut pack = Command::new("python3");
        pack.arg(crate::root().join("lab/mkimage.py")).arg(&to).arg(format!("rubelet:{}", self.version)).arg(&root);
        pack.args(["--entrypoint", r#"["/usr/bin/rubelet"]"#]);
        self.run("packing the image", &mut pack)?;
        fs::remove_dir_all(root)?;
        Ok(to)
    }

    fn sbom(&self) -> Result<PathBuf> {
        let mut command = crate::setup::cargo();
        command.args(["metadata", "--format-version=1", "--locked"]);
        let host = read(Command::new("rustc").arg("-vV"))?;
        if let Some(target) = host.lines().find_map(|l| l.strip_prefix("host: ")) {
            command.args(["--filter-platform", target]);
        }
        let metadata = serde_json::from_str(&read(&mut command)?).context("cargo metadata")?;
        let commit = read(git().args(["rev-parse", "HEAD"]))?;
        let to = self.name(".spdx.json");
        let text = sbom::spdx(&metadata, &self.version, commit.trim(), &self.stamp)?;
        write(&to, &text, 0o644)?;
        Ok(to)
    }

    fn checksums(&self, files: &[PathBuf]) -> Result<PathBuf> {
        let names = files.iter().filter_map(|f| f.file_name());
        let text = read(Command::new("sha256sum").args(names).current_dir(&self.out))?;
        let to = self.out.join("SHA256SUMS");
        write(&to, &text, 0o644)?;
        Ok(to)
    }
}

/// The files that the system's linker loads with a program; none for a static one.
fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd").arg(program).output().context("cannot run ldd")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let path = |line: &str| {
        let words = line.split_whitespace();
        words.into_iter().find(|w| w.starts_with('/')).map(PathBuf::from)
    };
    Ok(text.lines().filter_map(path).collect())
}
