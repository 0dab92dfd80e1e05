#!/usr/bin/env python3
"""joined.py WHAT: inside the VM, a node of the API server at https://127.0.0.1:6443, in lines that do not change from run to run.

ready       the API server is
resize      pods that are resized in steps: after each, what the API shows of the pod, and what changed in its cgroups
pressure    a pod that is throttled, one that the kernel kills for memory, one that is evicted for it: what the API shows of them and of the node

Pods go by their names instead of UIDs.
"""
import json, re, ssl, sys, time, urllib.error, urllib.request

import observe

API = "https://127.0.0.1:6443"
PODS = "/api/v1/namespaces/default/pods"
LIMIT = 240


def call(method, path, body=None, kind="application/json"):
    request = urllib.request.Request(API + path, method=method, data=None if body is None else json.dumps(body).encode())
    request.add_header("Authorization", "Bearer admin")
    request.add_header("Content-Type", kind)
    with urllib.request.urlopen(request, context=ssl._create_unverified_context(), timeout=60) as answer:
        return json.load(answer)


def resources(requests=None, limits=None):
    return {k: v for k, v in (("requests", requests), ("limits", limits)) if v}


def amounts(cpu, memory):
    return {k: v for k, v in (("cpu", cpu), ("memory", memory)) if v}


def container(name, requests=None, limits=None, policy=()):
    c = {"name": name, "image": "lab.test/busybox:1", "command": ["sleep", "100000"], "resources": resources(requests, limits)}
    if policy:
        c["resizePolicy"] = [{"resourceName": r, "restartPolicy": p} for r, p in policy]
    return c


def change(*containers, level=None):
    """A patch of the resize subresource."""
    spec = {"containers": [{"name": n, "resources": r} for n, r in containers]}
    if level:
        spec["resources"] = level
    return {"spec": spec}


SMALL, MORE = amounts("100m", "64Mi"), amounts("200m", "96Mi")
ODD = amounts("125m", "67890124")
# The pods, and their steps: what the step is about, and the patch.
PODS_AND_STEPS = [
    ("guaranteed", {"containers": [container("c", SMALL, SMALL)]}, [
        ("more of both", change(("c", resources(MORE, MORE)))),
        ("less CPU", change(("c", resources(amounts("50m", "96Mi"), amounts("50m", "96Mi"))))),
        ("less memory", change(("c", resources(amounts("50m", "48Mi"), amounts("50m", "48Mi"))))),
        ("odd amounts", change(("c", resources(ODD, ODD)))),
        ("almost no CPU", change(("c", resources(amounts("5m", "64Mi"), amounts("5m", "64Mi"))))),
    ]),
    ("burstable", {"containers": [container("c", SMALL, MORE), container("free", amounts("10m", "16Mi"))]}, [
        ("limits up", change(("c", resources(SMALL, amounts("400m", "128Mi"))))),
        ("limits down", change(("c", resources(SMALL, amounts("150m", "80Mi"))))),
        ("requests up", change(("c", resources(amounts("150m", "80Mi"), amounts("150m", "80Mi"))))),
        ("of the one without limits", change(("free", resources(amounts("30m", "24Mi"))))),
        ("one up, one down", change(("c", resources(amounts("50m", "32Mi"), amounts("100m", "64Mi"))), ("free", resources(amounts("90m", "48Mi"))))),
    ]),
    ("both", {"containers": [container("a", SMALL, SMALL), container("b", MORE, MORE)]}, [
        ("one up, one down", change(("a", resources(MORE, MORE)), ("b", resources(SMALL, SMALL)))),
        ("both up", change(("a", resources(amounts("220m", "128Mi"), amounts("220m", "128Mi"))), ("b", resources(amounts("220m", "128Mi"), amounts("220m", "128Mi"))))),
        ("more than is left", change(("a", resources(amounts("700m", "128Mi"), amounts("700m", "128Mi"))))),
        ("more than there is", change(("a", resources(amounts("2", "128Mi"), amounts("2", "128Mi"))))),
        ("both down", change(("a", resources(SMALL, SMALL)), ("b", resources(SMALL, SMALL)))),
    ]),
    ("restarts", {"containers": [container("c", SMALL, SMALL, [("cpu", "NotRequired"), ("memory", "RestartContainer")])]}, [
        ("CPU alone", change(("c", resources(amounts("200m", "64Mi"), amounts("200m", "64Mi"))))),
        ("memory with a restart", change(("c", resources(amounts("200m", "96Mi"), amounts("200m", "96Mi"))))),
    ]),
    ("level", {"resources": resources(MORE, amounts("400m", "128Mi")), "containers": [container("c", SMALL), container("d")]}, [
        ("the pod's limits up", change(level=resources(MORE, amounts("600m", "192Mi")))),
        ("the pod's limits down", change(level=resources(MORE, amounts("300m", "100Mi")))),
        ("a container's request", change(("c", resources(amounts("150m", "80Mi"))))),
    ]),
]


def shown(pod):
    """What the API shows of a pod's resources."""
    status = pod["status"]
    # Not the pod's own `resources`: the Go kubelet reads them back from the cgroup, rounded, and some of them never again.
    parts = [f"allocated {json.dumps(status.get('allocatedResources'), sort_keys=True)}"]
    for c in sorted(status.get("containerStatuses", []), key=lambda c: c["name"]):
        parts.append(f"{c['name']} {json.dumps({k: c.get(k) for k in ('resources', 'allocatedResources')}, sort_keys=True)} restarts {c['restartCount']}")
    conditions = [" ".join((c["type"], c["status"], c.get("reason", ""), c.get("message", ""))) for c in status.get("conditions", []) if c["type"].startswith("PodResize")]
    return parts + sorted(conditions)


def groups_of(pod):
    """The values of the pod's cgroups, by its name."""
    uid, name = pod["metadata"]["uid"], pod["metadata"]["name"]
    lines = []
    for line in observe.values():
        for form in (uid, uid.replace("-", "_")):
            line = line.replace(form, f"<{name}>")
        lines.append(line)
    return [line for line in lines if f"<{name}>" in line]


def settled(name, generation):
    """The pod once it runs, is seen in this form, and nothing of it has moved for two seconds."""
    end, last, since = time.time() + LIMIT, None, 0
    while time.time() < end:
        try:
            pod = call("GET", f"{PODS}/{name}")
            statuses = pod["status"].get("containerStatuses", [])
            busy = any(c["type"] == "PodResizeInProgress" for c in pod["status"].get("conditions", []))
            runs = len(statuses) == len(pod["spec"]["containers"]) and all("running" in c["state"] for c in statuses)
            if runs and not busy and pod["status"].get("observedGeneration", 0) >= generation:
                now = (shown(pod), groups_of(pod))
                if now == last and time.time() - since > 2:
                    return now
                if now != last:
                    last, since = now, time.time()
        except (OSError, KeyError) as e:
            print("not yet:", e, file=sys.stderr)
        time.sleep(0.5)
    print(f"{name} does not settle: {json.dumps(pod['status'].get('conditions'))} {shown(pod)}", file=sys.stderr)
    return (last or ([], []))[0] + ["NOT SETTLED"], (last or ([], []))[1]


def note(what):
    print(f"[up {observe.read('/proc/uptime').split()[0]}] {what}", file=sys.stderr)


def create(name, spec):
    """The pod's generation."""
    body = {"metadata": {"name": name}, "spec": {"nodeName": "n1", "terminationGracePeriodSeconds": 0, "automountServiceAccountToken": False, **spec}}
    return call("POST", PODS, body)["metadata"].get("generation", 0)


def resize():
    waiting = {name: create(name, spec) for name, spec, _ in PODS_AND_STEPS}
    for name, _, steps in PODS_AND_STEPS:
        before = []
        for what, patch in [("as it was made", None), *steps]:
            generation = waiting[name]
            if patch:
                try:
                    kind = "application/strategic-merge-patch+json"
                    generation = call("PATCH", f"{PODS}/{name}/resize", patch, kind)["metadata"].get("generation", 0)
                except urllib.error.HTTPError as e:
                    print(f"{name}, {what}: refused: {e.read().decode()[:300]}")
                    continue
            status, groups = settled(name, generation)
            for line in status:
                print(f"{name}, {what}: {line}")
            for line in groups:
                if line not in before:
                    print(f"{name}, {what}: {line}")
            before = groups
            note(f"{name}, {what}")


def until(what, condition):
    end = time.time() + LIMIT
    while time.time() < end:
        try:
            got = condition()
            if got:
                note(what)
                return got
        except OSError as e:
            print("not yet:", e, file=sys.stderr)
        time.sleep(0.3)
    print(f"NOT SEEN: {what}")
    return None


def ready():
    if not until("the API server is ready", lambda: call("GET", "/api/v1/namespaces/default")):
        sys.exit(1)


def get(name):
    return call("GET", f"{PODS}/{name}")


def node_condition(kind):
    node = call("GET", "/api/v1/nodes/n1")
    return next((c["status"] + " " + c["reason"] for c in node["status"]["conditions"] if c["type"] == kind), "")


def ended(name, killed=False):
    """How a pod ended, without what changes from run to run. `killed`: by the kernel, for memory."""
    status = get(name)["status"]
    if status.get("reason") == "Evicted":
        # The Go kubelet shows a container that it lost sight of as one to come, or as of unknown state, when the machine is slow.
        status["containerStatuses"] = []
    told = lambda of: re.sub(r"\d+(Ki|Mi)?", "#", of.get("message", ""))
    print(f"{name}: {status['phase']}, reason {status.get('reason')}, message {told(status)!r}")
    for c in status.get("containerStatuses", []):
        for kind, state in c["state"].items():
            if killed:
                observe.oom_reason(state)
            print(f"{name}, {c['name']}: {kind} {state.get('reason')} {state.get('exitCode')}, restarts {c['restartCount']}")
    for c in sorted(status["conditions"], key=lambda c: c["type"]):
        print(f"{name}, {c['type']}: {c['status']} {c.get('reason')} {told(c)!r}")


def shell(name, script, **resources_):
    c = container(name, **resources_)
    c["command"] = ["sh", "-c", script]
    return c


def running(name):
    return until(f"{name} runs", lambda: get(name)["status"].get("phase") == "Running")


def pressure():
    create("busy", {"containers": [shell("c", "while :; do :; done", requests=SMALL, limits=SMALL)]})
    running("busy")
    uid = get("busy")["metadata"]["uid"]
    group = next(g for g in observe.groups() if uid in g or uid.replace("-", "_") in g)

    def throttled():
        return int(re.search(r"nr_throttled (\d+)", observe.read(f"{observe.ROOT}/{group}/cpu.stat"))[1]) > 5
    print("busy is throttled:", until("busy is throttled", throttled))
    call("DELETE", f"{PODS}/busy")

    eater = "x=a; while :; do x=$x$x; done"
    for name, policy in (("eats", "Never"), ("eats-again", "Always")):
        create(name, {"restartPolicy": policy, "containers": [shell("c", eater, requests=amounts("50m", "32Mi"), limits=amounts("500m", "32Mi"))]})
    until("eats has ended", lambda: get("eats")["status"]["phase"] == "Failed")
    ended("eats", killed=True)
    # The child alone is too big, and yet all of the container goes.
    last = until("eats-again is restarted", lambda: get("eats-again")["status"].get("containerStatuses", [{}])[0].get("lastState", {}).get("terminated"))
    observe.oom_reason(last or {"containerID": ""})
    print(f"eats-again: last {last and (last['reason'], last['exitCode'])}")
    for name in ("eats", "eats-again"):
        call("DELETE", f"{PODS}/{name}")

    create("modest", {"containers": [container("c", amounts("50m", "32Mi"), amounts("50m", "32Mi"))]})
    running("modest")
    hog = shell("c", "dd if=/dev/zero of=/v/big bs=1M count=220; sleep 100000")
    hog["volumeMounts"] = [{"name": "v", "mountPath": "/v"}]
    create("hog", {"containers": [hog], "volumes": [{"name": "v", "emptyDir": {"medium": "Memory", "sizeLimit": "250Mi"}}]})
    # With a delete that is asked for, nothing may be left of it: hog stays until it is evicted.
    until("there is pressure", lambda: node_condition("MemoryPressure").startswith("True"))
    print("node:", node_condition("MemoryPressure"))
    until("hog is evicted", lambda: get("hog")["status"]["phase"] == "Failed")
    ended("hog")
    until("there is no pressure", lambda: node_condition("MemoryPressure").startswith("False"))
    print("node:", node_condition("MemoryPressure"))
    ended("modest")


if __name__ == "__main__":
    {"ready": ready, "resize": resize, "pressure": pressure}[sys.argv[1]]()
