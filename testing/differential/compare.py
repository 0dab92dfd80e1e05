"""Differences between two recordings, one line each, and those among them that are meant to be."""
import json, re

# Go 1.36.1 crashes on these: it looks up the runtime class in a manager that it has only with an API server. rubelet runs them.
GO_CRASHES = {'runtime-class'}

# Containers that come and go for as long as their pod is wanted: what they are at depends on the moment.
FLAPPING = {'end-retry-diff': {'c'}, 'end-start-diff': {'c', 'hook'}, 'probes-diff': {'dying'}, 'image-missing-diff': {'tag'}, 'image-init-diff': {'i'}}

# Where rubelet differs and means to: a pattern for the difference's line, and why.
MEANT = [
    (r'vol-projected|1a48344f429acf6af85afe71c6b56c24', 'Go mounts no projected volume without an API server, not even one of downwardAPI alone; rubelet does'),
    (r'vol-rro|7cd7095ec09fc0fb859dbea3e732ea1b', 'Go thinks no runtime can mount recursively read-only when it has no API server; rubelet asks the runtime'),
    (r'runtime-class|914506b404775dd020ceb2552a592344', 'Go crashes on runtimeClassName without an API server; rubelet runs the pod with the default handler'),
    (r'^root: (checkpoints|cpu_manager_state|dra_manager_state|memory_manager_state|pod-resources/kubelet.sock|image_manager)', 'parts that are not there yet'),
    (r'^root: rubelet', "rubelet's own folder"),
    (r'^root: pods/[^/]+/rubelet-probes', 'what probes found, kept over a restart without an API server'),
    (r'env\[6\]\.value: Go "\(absent\)", here ""', 'an empty text that the manifest names is shown'),
]

def machine_bound(line, want, got):
    """True for what comes from the machine: its size, its kernel, its own /etc/hosts."""
    if want['cgroup'] != got['cgroup'] and line.startswith('cgroups'): return True
    return re.search(r'oom_score_adj|hugepage_limits|hugetlb|NODE_|size=|^cgroups: (/kubepods\.|.*(\.in\[|memsw|soft_limit|cpuset))|memory_swap_limit|unified|masked_paths'
                     r'|^processes: .*(mounts\[|Cap[A-Z]|Seccomp)|hosts file \(host network\)|apparmor-diff', line)


def flat(v, path=''):
    """Leaves by path."""
    if isinstance(v, dict) and v:
        for k, x in v.items(): yield from flat(x, f'{path}.{k}' if path else k)
    elif isinstance(v, list) and v:
        for i, x in enumerate(v): yield from flat(x, f'{path}[{i}]')
    else: yield path, v

def diff(where, want, got):
    w, g = dict(flat(want)), dict(flat(got)); out = []
    for k in [*w, *(k for k in g if k not in w)]:
        a, b = w.get(k, '(absent)'), g.get(k, '(absent)')
        if a != b: out.append(f'{where}: {k}: Go {json.dumps(a, ensure_ascii=False)}, here {json.dumps(b, ensure_ascii=False)}')
    return out

def sets(where, want, got):
    return [f'{where}: Go only {x}' for x in sorted(set(want) - set(got))] + [f'{where}: here only {x}' for x in sorted(set(got) - set(want))]


def steady(pod):
    """A pod of /pods without what depends on the moment."""
    flapping = FLAPPING.get(pod['metadata']['name'], ())
    if not flapping: return pod
    pod = json.loads(json.dumps(pod)); s = pod['status']
    for k in ('containerStatuses', 'initContainerStatuses'):
        s[k] = [{'name': c['name']} if c['name'] in flapping else c for c in s.get(k, [])]
    for c in s.get('conditions', []): c.pop('message', None); c.pop('lastTransitionTime', None)
    return pod

def pods(want, got):
    out = []; q = lambda p: json.loads(re.sub(r'q: \d+', 'q: <n>', json.dumps(p)))  # what is missing depends on who was admitted before
    for n in want:
        if n in got: out += diff(f'/pods {n}', q(steady(want[n])), q(steady(got[n])))
        else: out.append(f'/pods {n}: not shown')
    return out + [f'/pods {n}: not with Go' for n in got if n not in want]


def calls(want, got):
    """Order of calls. Where a container starts again and again, as far as both recordings go; failed calls are repeated at times of their own."""
    def of(pod, entries):
        entries = [e for e in entries if not e.startswith(('RemoveContainer', 'UpdateRuntimeConfig'))]
        seen, out = set(), []
        for e in entries:
            if '(UNKNOWN' in e:
                if e in seen: continue
                seen.add(e)
            out.append(e)
        return out
    out = []
    for pod in sorted(set(want) | set(got)):
        w, g = of(pod, want.get(pod, [])), of(pod, got.get(pod, []))
        if pod not in FLAPPING: out += diff('calls', {pod: w}, {pod: g}); continue
        for c in sorted(FLAPPING[pod]):
            a, b = ([e for e in x if len(e.split(' ')) > 1 and e.split(' ')[1] == c] for x in (w, g)); n = min(len(a), len(b)); out += diff('calls', {f'{pod} {c}': a[:n]}, {f'{pod} {c}': b[:n]})
    return out

def made(want, got):
    def later(k, other):
        again = int(k.rsplit(' ', 1)[1])
        return again and k.split(' ')[1] in FLAPPING and k not in other
    return diff('made', {k: v for k, v in want.items() if not later(k, got)}, {k: v for k, v in got.items() if not later(k, want)})

def waiting(want, got):
    """Why containers waited or how they ended, at any time: all that is shown must be Go's."""
    plain = lambda x: not re.search(r': (ContainerCreating|PodInitializing): $', x)
    short = lambda x: x.split(' ')[0].split('/')[1] in FLAPPING
    w, g = {x for x in want if plain(x)}, {x for x in got if plain(x)}
    return [f'waiting: Go only {x}' for x in sorted(w - g) if not short(x)] + [f'waiting: here only {x}' for x in sorted(g - w)]

def images(want, got):
    def of(x, method): return [i for i in x.get(method, []) if 'annotations' in i and '<image' not in i]
    # After a pull Go asks for the image's size by its name; here it comes with the look at the id that the pull gave.
    def asked(x):
        pulled = [{k: v for k, v in json.loads(i).items() if k != 'sandbox'} for i in of(x, 'PullImage')]
        return [i for i in of(x, 'ImageStatus') if json.loads(i) not in pulled]
    return sets('images PullImage', of(want, 'PullImage'), of(got, 'PullImage')) + sets('images ImageStatus', asked(want), asked(got))

def root(want, got):
    def of(files):
        out = {}
        for p, v in files.items():
            # Go makes these at one of two places, with another mode each; several tries of a container leave several message files.
            if re.fullmatch(r'pods/[^/]+(/volumes)?', p): v = v.replace('drwxr-xr-x', 'drwxr-x---')
            if re.fullmatch(r'pods/[^/]+/containers/[^/]+', p) and not any(o.startswith(p + '/') for o in files): continue  # Go makes it before it refuses a container
            if p in ('allocated_pods_state', 'actuated_pods_state'): v = v.split(' ', 2)[0]
            out[p] = v
        return out
    return diff('root', of(want), of(got))

def logs(want, got):
    of = lambda files: {p: v for p, v in files.items() if not re.search(r'(%s)_' % '|'.join(FLAPPING), p) and not (p.count('/') == 1 and v.startswith('d'))}
    return diff('logs', of(want), of(got))

def links(want, got):
    of = lambda x: {k: v for k, v in x.items() if k.split('_')[0] not in FLAPPING}
    return diff('links', of(want), of(got))

def cgroups(want, got):
    of = lambda x: {k: {**v, 'in': [h for h in v['in'] if h != 'devices']} for k, v in x.items()}
    return diff('cgroups', of(want), of(got))

def processes(want, got):
    of = lambda x: {k: v for k, v in x.items() if k.split(' ')[1] not in FLAPPING.get(k.split(' ')[0], ())}
    def resolved(p):
        # Go keeps resolver options in a map: their order is random.
        text = re.sub(r'(?m)^options (.*)$', lambda m: 'options ' + ' '.join(sorted(m[1].split(' '))), p.get('etc/resolv.conf', '')); return {**p, 'etc/resolv.conf': text}
    return diff('processes', {k: resolved(v) for k, v in of(want).items()}, {k: resolved(v) for k, v in of(got).items()})

def removal(want, got):
    """How pods were taken down: which stops, in what order, with how much time."""
    def of(x):
        out = {}
        for pod, v in x.items():
            stops = [s for i, s in enumerate(v['stop']) if not s.startswith('StopPodSandbox') or s not in v['stop'][:i]]
            stops = [s for s in stops if not (s.startswith('StopContainer') and s.split(' ')[1] in FLAPPING.get(pod, ()))]
            if pod == 'steps-diff': stops = [re.sub(r' \{"timeout": "\d+"\}', '', s) for s in stops]; stops[:2] = sorted(stops[:2])  # apps at once; what was spent before counts
            # What is taken down already is made sure of once more, or not.
            if stops and stops != ['StopPodSandbox 0']: out[pod] = stops
        return out
    return diff('removal', of(want), of(got))

def metrics(want, got):
    out = []
    for n, (kind, labels) in got.items():
        if n not in want: out += [f'metrics: {n}: not with Go'] if labels else []
        elif want[n][0] != kind or set(labels) != set(want[n][1]) and labels and want[n][1]: out.append(f'metrics: {n}: Go {want[n]}, here {[kind, labels]}')
    return out


PARTS = {'pods': pods, 'calls': calls, 'made': made, 'waiting': waiting, 'images': images, 'root': root, 'logs': logs, 'links': links, 'cgroups': cgroups,
         'processes': processes, 'removal': removal, 'metrics': metrics, 'checkpoints': lambda w, g: diff('checkpoints', w, g), 'exec': lambda w, g: sets('exec', w, g)}

def settled(want, got):
    """True when the pods of /pods are as they are to become."""
    return not [l for l in pods(want, got) if not any(re.search(p, l) for p, _ in MEANT)]

def all(want, got):
    """Differences that are not meant, and how many of each kind are."""
    lines = [l for part, f in PARTS.items() for l in f(want.get(part, {}), got.get(part, {}))]
    if want['machine'] != got['machine']: lines = [l for l in lines if not machine_bound(l, want['machine'], got['machine'])]
    meant = {why: 0 for _, why in MEANT}; rest = []
    for l in lines:
        why = next((why for p, why in MEANT if re.search(p, l)), None)
        if why: meant[why] += 1
        else: rest.append(l)
    left = [l for p in got['after']['root'] if p.startswith('pods/') for l in [f'after: left behind: {p}']]
    return rest + left, meant
