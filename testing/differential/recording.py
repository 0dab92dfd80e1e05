"""What a kubelet did with the manifests, without what differs from run to run: ids, times, addresses, the order of parallel work."""
import collections, json, re
from lab import DIR, cgroups, machine, process, tree, wait

TIME = re.compile(r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)')


class Names:
    """Names in place of ids and addresses."""
    def __init__(self, lab):
        self.lab, self.ids = lab, {}
        for i in lab.cri.ListImages().get('images', []):
            self.ids[i['id']] = f'<image {(i.get("repo_tags") or ["?"])[0]}>'
            for d in i.get('repo_digests', []): self.ids[d] = f'<digest {(i.get("repo_tags") or ["?"])[0]}>'
        self.containers, self.sandboxes = [], []
        self.hex = re.compile(r'(?:sha256:)?[0-9a-f]{64}')
        self.ip = re.compile(r'(?<![\d.])' + re.escape(lab.subnet) + r'\d+(?![\d.])')
        import socket
        s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect(('192.0.2.1', 9)); self.host_ip = s.getsockname()[0]; s.close()
        self.own = re.compile(r'(?<![\d.])' + re.escape(self.host_ip) + r'(?![\d.])')
    def learn(self, calls):
        for c in calls:
            if 'answer' not in c: continue
            if c['method'] == 'RunPodSandbox':
                m = c['request']['config']['metadata']; self.ids[c['answer']['pod_sandbox_id']] = f'<sandbox {m["name"]} {m.get("attempt", 0)}>'
            if c['method'] == 'CreateContainer':
                m = c['request']['config']['metadata']; p = c['request']['sandbox_config']['metadata']['name']
                self.ids[c['answer']['container_id']] = f'<container {p} {m["name"]} {m.get("attempt", 0)}>'
    def clean(self, v):
        if isinstance(v, dict): return {self.clean(k): self.clean(x) for k, x in v.items()}
        if isinstance(v, list): return [self.clean(x) for x in v]
        if not isinstance(v, str): return v
        v = self.hex.sub(lambda m: self.ids.get(m[0], self.ids.get('sha256:' + m[0], '<id>')), v)
        v = TIME.sub('<time>', self.ip.sub('<ip>', v)).replace(self.lab.cgroup, '/ROOT').replace(self.lab.stage, 'STAGE').replace(self.lab.stage[4:], 'STAGE')
        v = re.sub(r'(/containers/[a-z0-9-]+/)[0-9a-f]{8}\b', r'\1<hex>', v)
        v = re.sub(r'\.\.\d{4}_\d\d_\d\d_\d\d_\d\d_\d\d\.\d+', '..<stamp>', v)
        v = re.sub(r'127\.0\.0\.1:\d{4,5}', '127.0.0.1:<port>', v)
        v = self.own.sub('<host-ip>', v)
        return v


def by_pod(calls, names):
    """Calls that change the runtime, of each pod in order: what was asked, and once for each sandbox and container how it is made."""
    order, made, images, updates = collections.defaultdict(list), {}, collections.defaultdict(set), []
    sandboxes = {}
    for c in calls:
        m, r = c['method'], c['request']; error = c.get('error')
        tail = f' ({re.sub(r"[0-9a-f-]{36}", "<uuid>", error)})' if error else ''
        if m == 'RunPodSandbox':
            dns_sorted(r['config']); meta = r['config']['metadata']; name = f'{meta["name"]} {meta.get("attempt", 0)}'; order[meta['name']].append((c, f'RunPodSandbox {meta.get("attempt", 0)}{tail}'))
            made.setdefault('sandbox ' + name, r); sandboxes[meta['name']] = r['config']
        elif m == 'CreateContainer':
            dns_sorted(r['sandbox_config']); meta, pod = r['config']['metadata'], r['sandbox_config']['metadata']['name']; n = f'{meta["name"]} {meta.get("attempt", 0)}'
            order[pod].append((c, f'CreateContainer {n}{tail}'))
            if r['sandbox_config'] == sandboxes.get(pod): r = {**r, 'sandbox_config': '(as RunPodSandbox)'}
            
            r['config']['envs'] = sorted(r['config'].get('envs', []), key=lambda e: e['key']); made.setdefault(f'container {pod} {n}', r)
        elif m in ('PullImage', 'ImageStatus', 'RemoveImage'):
            s = r['image']; pod = (r.get('sandbox_config') or {}).get('metadata', {}).get('name', '')
            images[m].add(json.dumps({**s, **({'sandbox': pod} if pod else {}), **({'auth': True} if r.get('auth') else {})}, sort_keys=True, ensure_ascii=False))
        elif m == 'ExecSync': pass
        else:
            i = r.get('container_id') or r.get('pod_sandbox_id') or ''; who = names.ids.get(i, '<unknown>').strip('<>').split(' ')
            rest = {k: v for k, v in r.items() if k not in ('container_id', 'pod_sandbox_id')}
            order[who[1] if len(who) > 1 else '?'].append((c, ' '.join([m, *who[2:], *([json.dumps(rest, sort_keys=True)] if rest else [])]) + tail))
            if m.startswith('Update'): updates.append(m)
    return order, made, {k: sorted(v) for k, v in images.items()}, updates


def dns_sorted(config):
    """Go keeps resolver options and variables in maps: their order is random."""
    if config.get('dns_config', {}).get('options'): config['dns_config']['options'].sort()


def together(entries):
    """Texts in order; calls that ran at the same time as each other in alphabetical order."""
    out, group, end = [], [], 0
    for c, text in entries:
        if group and c['t'] >= end - .002: out += sorted(group); group = []
        group.append(text); end = max(end if len(group) > 1 else 0, c['t'] + c['took'])
    return out + sorted(group)


def status(pod, names):
    """A pod of /pods."""
    pod = names.clean(pod)
    for k in ('containerStatuses', 'initContainerStatuses'):
        for c in pod['status'].get(k, []):
            for s in (c.get('state', {}), c.get('lastState', {})):
                for x in s.values():
                    if 'message' in x: x['message'] = re.sub(r'back-off \d+m?\d*s', 'back-off <n>s', x['message'])
    return pod

def metrics(text):
    """Type and label names of every metric."""
    out = {}
    for l in text.splitlines():
        if l.startswith('# TYPE '): _, _, n, t = l.split(); out[n] = [t, set()]
        elif l and l[0] != '#':
            n, labels = re.match(r'([^{ ]+)(?:\{(.*)\})? ', l).groups(); base = n
            if n not in out: base = re.sub(r'_(bucket|sum|count)$', '', n)
            if base in out: out[base][1] |= set(re.findall(r'(\w+)="', labels or '')) - {'le', 'quantile'}
    return {n: [t, sorted(l)] for n, (t, l) in sorted(out.items())}


EVENT = re.compile(r'"Event occurred" (?P<rest>object=.*)')
def events(log):
    """Events that a kubelet without API server writes to its log: object, field, type, reason, message."""
    out = set()
    for l in open(log, errors='replace'):
        m = EVENT.search(l)
        if not m: continue
        f = {k: (json.loads(v) if v.startswith('"') else v) for k, v in re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)', m['rest'])}
        out.add((f.get('object', ''), f.get('fieldPath', ''), f.get('type', ''), f.get('reason', ''), f.get('message', '')))
    return sorted(out)


class Watch:
    """What is shown of the pods over time."""
    def __init__(self, lab): self.lab, self.names, self.waiting = lab, Names(lab), set()
    def look(self):
        """All pods as they are shown now, by name. Also notes why containers wait."""
        self.names.learn(self.lab.calls())
        pods = {p['metadata']['namespace'] + '/' + p['metadata']['name']: status(p, self.names) for p in self.lab.pods()}
        for n, p in pods.items():
            for c in p['status'].get('initContainerStatuses', []) + p['status'].get('containerStatuses', []):
                for w in (c['state'].get('waiting'), (c['state'].get('terminated') or {}).get('message') and c['state']['terminated']):
                    if w: self.waiting.add(f'{n} {c["name"]}: {w.get("reason")}: {w.get("message", "")}')
        return pods


def collect(lab, watch):
    """Everything that can be seen while the pods are there."""
    names = Names(lab); calls = lab.calls(); names.learn(calls)
    order, made, images, _ = by_pod(calls, names)
    rec = {'machine': machine(lab)}
    rec['pods'] = wait('/pods answers', watch.look, 60); rec['waiting'] = sorted(watch.waiting)
    rec['calls'] = {p: [t for _, t in e] for p, e in sorted(order.items())}
    rec['made'] = {k: v for k, v in sorted(made.items())}
    rec['images'] = images
    rec['exec'] = sorted({json.dumps([names.ids.get(c['request'].get('container_id', ''), '?').rsplit(' ', 1)[0].strip('<'), c['request'].get('cmd'), c['request'].get('timeout')]) for c in calls if c['method'] == 'ExecSync'})
    rec['root'] = tree(DIR + '/root'); rec['logs'] = tree(DIR + '/logs')
    rec['links'] = links()
    rec['cgroups'] = cgroups(lab.cgroup)
    rec['processes'] = {}
    for c in lab.cri.ListContainers(filter={'state': {'state': 'CONTAINER_RUNNING'}}).get('containers', []):
        name = f'{c["labels"]["io.kubernetes.pod.name"]} {c["metadata"]["name"]}'
        info = json.loads(lab.cri.ContainerStatus(container_id=c['id'], verbose=True)['info']['info'])
        try: rec['processes'][name] = process(info['pid'])
        except OSError: pass
    for f in ('allocated_pods_state', 'actuated_pods_state'):
        try: c = json.load(open(f'{DIR}/root/{f}')); rec.setdefault('checkpoints', {})[f] = {**c, 'data': json.loads(c['data']), 'checksum is right': c['checksum'] == fnv(c['data'])}; del rec['checkpoints'][f]['checksum']
        except OSError: pass
    rec['metrics'] = metrics(lab.get('/metrics').decode())
    rec['events'] = events(lab.log)
    return names.clean(rec)


def fnv(text):
    h = 0x811c9dc5
    for b in b'(string)' + text.encode(): h = (h ^ b) * 0x01000193 & 0xffffffff
    return h

def links():
    import glob, os
    return {os.path.basename(l): os.readlink(l) for l in glob.glob('/var/log/containers/*') if os.path.islink(l) and os.readlink(l).startswith(DIR + '/')}


def removal(lab, since):
    """What was called to take the pods down."""
    names = Names(lab); calls = lab.calls(); names.learn(calls)
    order, _, _, _ = by_pod([c for c in calls if c['t'] >= since], names)
    out = {}
    for pod, entries in sorted(order.items()):
        stops = [e for e in entries if e[1].startswith('Stop') or e[1].startswith('StopPod')]
        rest = [e for e in entries if e not in stops]
        out[pod] = {'stop': together(stops), 'other': sorted({t for _, t in rest})}
    return names.clean(out)


def write(rec, path):
    """A line for each pod, container, file …, so that a diff of two recordings can be read."""
    rec = {'made by': 'testing/differential/run --kubelet GO-KUBELET --record ' + path, **rec}
    def part(v):
        if not isinstance(v, (dict, list)) or not v: return json.dumps(v, ensure_ascii=False)
        one = lambda x: json.dumps(x, ensure_ascii=False, sort_keys=True, separators=(',', ':'))
        rows = [f'{one(k)}:{one(x)}' for k, x in sorted(v.items())] if isinstance(v, dict) else [one(x) for x in v]
        return '{['[isinstance(v, list)] + '\n' + ',\n'.join(rows) + '\n' + '}]'[isinstance(v, list)]
    with open(path, 'w') as f: f.write('{' + ',\n'.join(f'{json.dumps(k)}:{part(v)}' for k, v in rec.items()) + '}\n')
