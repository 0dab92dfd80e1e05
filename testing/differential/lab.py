"""A kubelet program on a private containerd: started, asked, looked at, stopped, and everything removed again.

The folder of a run has a fixed path, since the UID of a static pod is a hash of its file's path: one run at a time on a machine.
"""
import fcntl, glob, http.client, json, os, random, re, shutil, signal, socket, stat, subprocess, sys, time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
LAB = os.environ.get('RUBELET_LAB') or os.path.join(os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache'), 'rubelet-lab')
VENV = LAB + '/rigvenv'
DIR = '/var/tmp/rubelet-differential'
NODE = 'diff'


def needs_grpc():
    """Goes on in a Python that has grpcio; makes it once."""
    try: import grpc, grpc_tools.protoc; return  # noqa
    except ImportError: pass
    python = VENV + '/bin/python'
    if os.path.realpath(sys.prefix) == os.path.realpath(VENV): sys.exit(VENV + ' has no grpcio: remove it and run again')
    if subprocess.run([python, '-c', 'import grpc, grpc_tools.protoc'], capture_output=True).returncode if os.path.exists(python) else True:
        try:
            subprocess.run([sys.executable, '-m', 'venv', VENV], check=True)
            subprocess.run([VENV + '/bin/pip', 'install', '-q', '--disable-pip-version-check', 'grpcio', 'grpcio-tools'], check=True)
        except (OSError, subprocess.CalledProcessError) as e: print('skipped: no Python with grpcio:', e); sys.exit(3)
    os.execv(python, [python, *sys.argv])


def free_port():
    """Below the ports that outgoing connections take by themselves."""
    for port in random.sample(range(20000, 32000), 100):
        with socket.socket() as s:
            try: s.bind(('0.0.0.0', port)); return port
            except OSError: pass
    raise OSError('no free port')

def wait(what, f, limit, step=.1):
    t = time.monotonic()
    while time.monotonic() - t < limit:
        v = f()
        if v: return v
        time.sleep(step)
    raise TimeoutError(f'{what}: not within {limit} s')


class Lab:
    """The place of a run on the containerd at SOCKET (a stage of `cargo xtask containerd` or `cargo xtask test`)."""
    def __init__(self, socket_path):
        from cri import Client
        self.stage, self.socket = os.path.dirname(socket_path), socket_path
        self.cri, self.children = Client(socket_path), []
        self.lock = open(DIR + '.lock', 'w')
        try: fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError: sys.exit('another run is under way: ' + DIR)
        record = json.load(open(self.stage + '/record.json'))
        self.cgroup = record['cgroup'] + '/differential'; self.subnet = record['subnet'].rsplit('.', 1)[0] + '.'
        self.wipe()
        for d in ('manifests', 'root/seccomp/sub', 'logs', 'host'): os.makedirs(f'{DIR}/{d}')
        open(DIR + '/resolv.conf', 'w').write('nameserver 192.0.2.250\nsearch host.example\noptions timeout:1 attempts:2\n')
        open(DIR + '/root/seccomp/sub/all.json', 'w').write('{"defaultAction":"SCMP_ACT_ALLOW"}')
        subprocess.run(['mount', '--bind', DIR + '/host', DIR + '/host'], check=True); subprocess.run(['mount', '--make-rshared', DIR + '/host'], check=True)
        open(DIR + '/host/file', 'w').write('host file\n'); os.symlink('/etc', DIR + '/host/link')
        s = socket.socket(socket.AF_UNIX); s.bind(DIR + '/host/sock'); s.close()
        make_cgroup(self.cgroup)
        port = free_port(); hosts = self.stage + '/hosts/lab.test'; os.makedirs(hosts, exist_ok=True)
        open(hosts + '/hosts.toml', 'w').write(f'server = "http://127.0.0.1:{port}"\n[host."http://127.0.0.1:{port}"]\n  capabilities = ["pull", "resolve"]\n')
        self.spawn('registry', [sys.executable, ROOT + '/lab/registry.py', '--port', str(port), *sorted(glob.glob(LAB + '/images/small/*.tar'))])
        self.proxy_socket = DIR + '/cri.sock'
        self.spawn('proxy', [sys.executable, HERE + '/proxy.py', self.proxy_socket, socket_path, DIR + '/calls.jsonl'])
        wait('the proxy', lambda: os.path.exists(self.proxy_socket), 60)
        ro, self.healthz = free_port(), free_port(); self.read_only = ro
        self.config = {
            'apiVersion': 'kubelet.config.k8s.io/v1beta1', 'kind': 'KubeletConfiguration', 'containerRuntimeEndpoint': 'unix://' + self.proxy_socket,
            'staticPodPath': DIR + '/manifests', 'fileCheckFrequency': '1s', 'podLogsDir': DIR + '/logs', 'cgroupRoot': self.cgroup, 'cgroupDriver': 'cgroupfs',
            'failCgroupV1': False, 'failSwapOn': False, 'port': free_port(), 'readOnlyPort': ro, 'healthzPort': self.healthz, 'podPidsLimit': 1234,
            'clusterDNS': ['10.96.0.10'], 'clusterDomain': 'cluster.local', 'resolvConf': DIR + '/resolv.conf', 'kubeReserved': {'cpu': '100m', 'memory': '64Mi'},
            'systemReserved': {'cpu': '50m', 'memory': '32Mi'}, 'authentication': {'anonymous': {'enabled': True}, 'webhook': {'enabled': False}},
            'authorization': {'mode': 'AlwaysAllow'}, 'imageGCHighThresholdPercent': 100, 'makeIPTablesUtilChains': False,
            'evictionHard': {'memory.available': '50Mi', 'nodefs.available': '1%', 'nodefs.inodesFree': '1%', 'imagefs.available': '1%'}}
        json.dump(self.config, open(DIR + '/config.json', 'w'))

    def spawn(self, name, argv):
        log = open(f'{DIR}/{name}.log', 'ab')
        # It goes when this script is killed. No preexec_fn for that: gRPC does not survive the fork.
        if shutil.which('setpriv'): argv = ['setpriv', '--pdeathsig', 'KILL', *argv]
        p = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=DIR, env={**os.environ, 'PYTHONDONTWRITEBYTECODE': '1'})
        self.children.append(p); return p

    # The program under test.

    def start(self, program, name='kubelet'):
        self.program, self.log = program, f'{DIR}/{name}.log'
        self.kubelet = self.spawn(name, [program, '--config', DIR + '/config.json', '--root-dir', DIR + '/root', '--hostname-override', NODE, '--cert-dir', DIR + '/pki', '--v=4'])
        def healthy():
            if self.kubelet.poll() is not None: raise RuntimeError(f'{program} ended with {self.kubelet.returncode}:\n' + ''.join(open(self.log, errors='replace').readlines()[-15:]))
            return self.get('/healthz', self.healthz) == b'ok'
        wait('the kubelet is healthy', healthy, 60)

    def stop(self):
        """SIGTERM; the seconds until it had ended."""
        t = time.monotonic(); self.kubelet.send_signal(signal.SIGTERM)
        try: self.kubelet.wait(30)
        except subprocess.TimeoutExpired: self.kubelet.kill(); self.kubelet.wait(); raise
        return time.monotonic() - t

    def get(self, path, port=None):
        try:
            c = http.client.HTTPConnection('127.0.0.1', port or self.read_only, timeout=10); c.request('GET', path); return c.getresponse().read()
        except OSError: return b''
    def pods(self):
        try: return json.loads(self.get('/pods') or b'{}').get('items') or []
        except ValueError: return []

    def write(self, names=None, skip=()):
        """Puts the manifests into the kubelet's folder, as they were at the time when the fixture was made."""
        for f in sorted(glob.glob(HERE + '/manifests/*.yaml')):
            name = os.path.basename(f)
            if (names is None or name[:-5] in names) and name[:-5] not in skip:
                text = open(f).read().replace('DIR', DIR); open(f'{DIR}/.{name}', 'w').write(text); os.rename(f'{DIR}/.{name}', f'{DIR}/manifests/{name}')
    def unwrite(self):
        for f in glob.glob(DIR + '/manifests/*'): os.unlink(f)
    def calls(self):
        try: return [json.loads(l) for l in open(DIR + '/calls.jsonl')]
        except OSError: return []

    # The end.

    def wipe_runtime(self):
        for s in self.cri.ListPodSandbox().get('items', []):
            for call in (self.cri.StopPodSandbox, self.cri.RemovePodSandbox):
                try: call(pod_sandbox_id=s['id'])
                except Exception as e: print(f'wiping {s["metadata"]["name"]}: {e}', file=sys.stderr)
    def wipe(self):
        self.wipe_runtime()
        for m in sorted((l.split()[1] for l in open('/proc/self/mounts') if l.split()[1].startswith(DIR + '/')), reverse=True): subprocess.run(['umount', '-l', m])
        shutil.rmtree(DIR, True)
        for l in glob.glob('/var/log/containers/*'):
            if os.path.islink(l) and os.readlink(l).startswith(DIR + '/'): os.unlink(l)
        remove_cgroup(self.cgroup)
    def close(self, keep=False):
        for p in reversed(self.children):
            if p.poll() is None: p.terminate()
            try: p.wait(10)
            except subprocess.TimeoutExpired: p.kill(); p.wait()
        if not keep: self.wipe()
        shutil.rmtree(self.stage + '/hosts/lab.test', True)


# ---- cgroups

V2 = os.path.exists('/sys/fs/cgroup/cgroup.controllers')
def hierarchies(): return ['/sys/fs/cgroup'] if V2 else sorted(d for d in glob.glob('/sys/fs/cgroup/*') if os.path.isdir(d) and not os.path.islink(d))
def make_cgroup(name):
    for h in hierarchies():
        parent = h
        for part in name.strip('/').split('/'):
            d = parent + '/' + part
            try:
                if V2: open(parent + '/cgroup.subtree_control', 'w').write(' '.join('+' + c for c in open(parent + '/cgroup.controllers').read().split()))
                os.makedirs(d, exist_ok=True)
                for f in ('cpuset.cpus', 'cpuset.mems'):
                    if not V2 and os.path.exists(f'{parent}/{f}'): open(f'{d}/{f}', 'w').write(open(f'{parent}/{f}').read())
            except OSError: break
            parent = d
def remove_cgroup(name):
    for h in hierarchies():
        top = h + name
        for d, _, _ in os.walk(top, topdown=False):
            for _ in range(50):
                for pid in open(d + '/cgroup.procs').read().split() if os.path.exists(d + '/cgroup.procs') else []:
                    try: os.kill(int(pid), signal.SIGKILL)
                    except OSError: pass
                try: os.rmdir(d); break
                except FileNotFoundError: break
                except OSError: time.sleep(.1)

FILES = ['cpu.shares', 'cpu.cfs_quota_us', 'cpu.cfs_period_us', 'memory.limit_in_bytes', 'memory.memsw.limit_in_bytes', 'memory.soft_limit_in_bytes', 'pids.max', 'cpuset.cpus',
         'cpu.weight', 'cpu.max', 'memory.max', 'memory.min', 'memory.low', 'memory.high', 'memory.swap.max', 'memory.oom.group']
def cgroups(root):
    """Values of every cgroup of pods and above, by path below the root; with the hierarchies that it stands in."""
    out = {}
    for h in hierarchies():
        top = h + root + '/kubepods'
        for d, subs, _ in os.walk(top):
            if os.path.basename(d).startswith('pod'): subs[:] = []
            values = out.setdefault(d[len(h + root):], {'in': []}); values['in'].append(os.path.basename(h))
            for f in FILES + [os.path.basename(p) for p in glob.glob(d + '/hugetlb.*.limit_in_bytes') + glob.glob(d + '/hugetlb.*.max')]:
                try: values[f] = open(f'{d}/{f}').read().strip()
                except OSError: pass
    return out


# ---- what is on disk

def mounts():
    out = {}
    for l in open('/proc/self/mountinfo'):
        f = l.split(); dash = f.index('-'); out[f[4]] = f'{f[dash + 1]} {f[5]} {",".join(sorted(o for o in f[dash + 3].split(",") if o.startswith(("size", "mode", "noswap"))))} {" ".join(x.split(":")[0] for x in f[6:dash])}'.strip()
    return out

def tree(top, skip=lambda p: False):
    """Kind, mode, owner and short content of everything below, by path; mount points say so."""
    out, points = {}, mounts()
    for d, subs, files in os.walk(top):
        subs.sort()
        for n in ['.'] * (d == top) + subs + sorted(files):
            p = d if n == '.' else f'{d}/{n}'
            if skip(p): continue
            try: s = os.lstat(p)
            except OSError: continue
            what = f'{stat.filemode(s.st_mode)} {s.st_uid}:{s.st_gid}'
            if stat.S_ISLNK(s.st_mode): what += ' -> ' + os.readlink(p)
            elif stat.S_ISREG(s.st_mode):
                try: b = open(p, 'rb').read()
                except OSError: b = b''
                what += ' ' + (json.dumps(b.decode(errors='replace'), ensure_ascii=False) if len(b) < 1500 else f'{len(b)} bytes')
            if p in points: what += ' mount ' + points[p]
            out[os.path.relpath(p, top)] = what
    return out


# ---- what a container's process got

def process(pid):
    def read(path, binary=False):
        try: return open(f'/proc/{pid}/{path}', 'rb').read().decode(errors='replace')
        except OSError: return None
    wanted = ('Uid', 'Gid', 'Groups', 'CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb', 'NoNewPrivs', 'Seccomp')
    out = {k: ' '.join(v.split()) for k, v in (l.split(':', 1) for l in (read('status') or '').splitlines()) if k in wanted}
    out['oom_score_adj'] = (read('oom_score_adj') or '').strip()
    out['cwd'] = os.readlink(f'/proc/{pid}/cwd')
    out['command'] = (read('cmdline') or '').split('\0')[:-1]
    for f in ('etc/hosts', 'etc/resolv.conf', 'etc/hostname', 'proc/sys/kernel/hostname', 'proc/sys/kernel/domainname'): out[f] = read('root/' + f) if f.startswith('etc') else None
    out['mounts'] = []
    for l in (read('mountinfo') or '').splitlines():
        f = l.split(); dash = f.index('-')
        out['mounts'].append(f'{f[4]} {f[5]} {" ".join(x.split(":")[0] for x in f[6:dash])} {f[dash + 1]} {f[3] if f[dash + 1] not in ("cgroup", "overlay") else ""}'.replace('  ', ' ').strip())
    return {k: v for k, v in out.items() if v is not None}


def machine(lab):
    """What figures in a recording depend on."""
    mem = int(re.search(r'MemTotal:\s+(\d+)', open('/proc/meminfo').read())[1]) * 1024
    return {'memory': mem, 'cpus': os.cpu_count(), 'hugepages': sorted(os.listdir('/sys/kernel/mm/hugepages')) if os.path.isdir('/sys/kernel/mm/hugepages') else [],
            'cgroup': 2 if V2 else 1, 'kernel': os.uname().release, 'containerd': lab.cri.Version()['runtime_version']}
