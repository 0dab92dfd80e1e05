#!/usr/bin/env python3
"""observe.py WHAT: inside the VM, waits ($WAIT, 90 seconds) for WHAT and prints it in lines that do not change from run to run.

running     every pod of the manifests runs; who has which UID
tree        every cgroup from kubepods down: what can be set, its processes; with the systemd driver also the slices' properties
tree-kept   the tree is still what `tree` saw; the differences if not
restarted   after the kubelet's restart: the same containers, none restarted
oom         how the container of pod `oom` ended
removed     all pods are gone; which cgroups, slices, containers and processes are left

Containers go by their names instead of ids, amounts that depend on the machine's memory as its total minus something.
"""
import glob, json, os, re, subprocess, sys, time, urllib.request

ROOT = "/sys/fs/cgroup"
SAVED = "/run/k/seen.json"
FILES = re.compile(r"cgroup\.(controllers|subtree_control)|cpu\.(max|weight)|cpuset\.(cpus|mems)|pids\.max|memory\.(min|low|high|max|oom\.group|swap\.max)|hugetlb\..*\.max")
PROPERTIES = ("Id Slice Transient LoadState ActiveState DefaultDependencies Wants CPUAccounting MemoryAccounting IOAccounting TasksAccounting CPUWeight "
              "CPUQuotaPerSecUSec CPUQuotaPeriodUSec AllowedCPUs MemoryMin MemoryLow MemoryHigh MemoryMax MemorySwapMax TasksMax Delegate").split()


def read(path):
    with open(path) as f:
        return f.read().strip()


def pods():
    with urllib.request.urlopen("http://127.0.0.1:10255/pods", timeout=30) as answer:
        return json.load(answer)["items"] or []


def statuses(pod):
    status = pod.get("status", {})
    return (status.get("initContainerStatuses") or []) + (status.get("containerStatuses") or [])


def wait(condition):
    """What the condition gives, once it is not None."""
    end = time.time() + int(os.environ.get("WAIT", "90"))
    while True:
        try:
            got = condition()
        except OSError:
            got = None
        if got is not None:
            return got
        if time.time() > end:
            sys.exit(1)
        time.sleep(0.3)


def containers():
    """(pod, container) to (id, restarts) of the containers that run."""
    return {f"{p['metadata']['name']}/{c['name']}": (c["containerID"].split("/")[-1], c["restartCount"])
            for p in pods() for c in statuses(p) if "running" in c.get("state", {})}


def wanted():
    """How many containers the manifests have."""
    return sum(read(f).count("  - name:") for f in glob.glob("/run/k/pods/*.yaml"))


def all_running():
    seen = containers()
    return seen if len(seen) == wanted() else None


def groups():
    """Every cgroup from kubepods down, as the path below the root."""
    found = []
    for top in sorted(glob.glob(f"{ROOT}/kubepods*")):
        found += [os.path.relpath(d, ROOT) for d, _, _ in os.walk(top)]
    return sorted(found)


def values():
    names = {id: name.split("/")[1] for name, (id, _) in containers().items()}

    def plain(path):
        def name(m):
            return names.get(m[0], "sandbox")
        return re.sub(r"[0-9a-f]{64}", name, path)

    total = int(re.search(r"MemTotal:\s*(\d+)", read("/proc/meminfo"))[1]) * 1024
    most_pids = min(int(read("/proc/sys/kernel/pid_max")), int(read("/proc/sys/kernel/threads-max")))
    # What systemd gives to a unit that says nothing: a part of the machine's.
    default = subprocess.run(["systemctl", "show", "-p", "DefaultTasksMax", "--value"], capture_output=True, text=True).stdout.strip() if os.path.isdir("/run/systemd/system") else ""

    def amount(group, file, value):
        if group in ("kubepods", "kubepods.slice") and value.isdigit():
            if file in ("memory.max", "MemoryMax"):
                return f"MemTotal - {total - int(value)}"
            if file in ("pids.max", "TasksMax"):
                return f"pids - {most_pids - int(value)}"
        if file in ("pids.max", "TasksMax") and value == default:
            return "DefaultTasksMax"
        return value

    lines = []
    for group in groups():
        for file in sorted(os.listdir(f"{ROOT}/{group}")):
            if FILES.fullmatch(file):
                lines.append(f"{plain(group)} {file}: {amount(group, file, ' '.join(read(f'{ROOT}/{group}/{file}').split()))}")
        for pid in read(f"{ROOT}/{group}/cgroup.procs").split():
            lines.append(f"{plain(group)} process: {read(f'/proc/{pid}/comm')} oom_score_adj {read(f'/proc/{pid}/oom_score_adj')}")
    slices = sorted({os.path.basename(g) for g in groups() if g.endswith(".slice")})
    if slices:
        shown = subprocess.run(["systemctl", "show", "-p", ",".join(PROPERTIES), *slices], capture_output=True, text=True, check=True).stdout
        for unit in shown.strip().split("\n\n"):
            have = dict(line.split("=", 1) for line in unit.splitlines())
            lines += [f"{have['Id']} {p}={amount(have['Id'], p, have[p])}" for p in PROPERTIES[1:] if p in have]
    return sorted(lines)


def oom_reason(state):
    """Sets the right reason of a container that the kernel killed. containerd's shim learns of that from a file in the cgroup, which may be gone by then;
    above all systemd is quick to remove it."""
    id = state["containerID"].split("/")[-1]
    if state.get("reason") == "Error" and not re.search(f"TaskOOM event.*{id}", read("/run/k/containerd.log")):
        print("containerd itself did not notice that the kernel killed for memory", file=sys.stderr)
        state["reason"] = "OOMKilled"


def see(what):
    if what == "running":
        seen = wait(all_running)
        for p in sorted(pods(), key=lambda p: p["metadata"]["name"]):
            print(f"pod {p['metadata']['name']}: uid {p['metadata']['uid']}, {p['status']['phase']}, {p['status']['qosClass']}")
        json.dump({"containers": seen}, open(SAVED, "w"))
    elif what == "tree":
        lines = values()
        print("\n".join(lines))
        json.dump({**json.load(open(SAVED)), "tree": lines}, open(SAVED, "w"))
    elif what == "tree-kept":
        # The Go kubelet writes a class's weight and memory protection anew at its start, and before the pods are known to it.
        anew = r"(burstable|burstable.slice) (cpu.weight|CPUWeight)|(kubepods|kubepods.slice|burstable|burstable.slice) (memory.(min|low)|Memory(Min|Low))"
        before, now = ([line for line in tree if not re.search(anew, line)] for tree in (json.load(open(SAVED))["tree"], values()))
        print("the tree is the same as before" if before == now else "the tree has changed")
        print("".join(f"- {line}\n" for line in before if line not in now) + "".join(f"+ {line}\n" for line in now if line not in before), end="")
    elif what == "restarted":
        before, now = json.load(open(SAVED))["containers"], wait(all_running)
        # A kubelet that did not know them again would make new ones in its first syncs.
        time.sleep(3)
        now = containers()
        for name in sorted(before):
            id, restarts = now.get(name, ("", "-"))
            print(f"restart: {name} {'kept' if id == before[name][0] else 'NOT kept'}, {restarts} restarts")
    elif what == "oom":
        def ended():
            for p in pods():
                for c in statuses(p):
                    if p["metadata"]["name"].startswith("oom-") and "terminated" in c.get("state", {}):
                        return p["status"]["phase"], c["state"]["terminated"]
        first = wait(ended)
        # A runtime may learn of the kill after the end, and the phase may come with the next sync.
        time.sleep(3)
        phase, state = wait(ended)
        if first != (phase, state):
            print("first seen:", first, file=sys.stderr)
        oom_reason(state)
        print(f"oom: phase {phase}, reason {state.get('reason')}, exit code {state['exitCode']}")
    elif what == "removed":
        wait(lambda: True if not pods() and not [g for g in groups() if re.search(r"pod[0-9a-f]{8}", g)] else None)
        for group in groups():
            print(f"left: {group}")
        if os.path.isdir("/run/systemd/system"):
            units = subprocess.run(["systemctl", "list-units", "--all", "--plain", "--no-legend", "kubepods*", "cri-containerd-*"], capture_output=True, text=True).stdout
            for unit in units.splitlines():
                print("unit left:", " ".join(unit.split()[:4]))
        left = subprocess.run(["ctr", "-n", "k8s.io", "tasks", "ls", "-q"], capture_output=True, text=True).stdout.split()
        print(f"tasks left: {len(left)}")


if __name__ == "__main__":
    see(sys.argv[1])
