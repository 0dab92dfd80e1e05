#!/usr/bin/env python3
"""Measure a kubelet on one node, standalone, with static pods on a real containerd.

usage: nodebench.py --kubelet PATH --containerd SOCK --ctr CTR --work DIR [--pods 30] [--idle 30] [--restarts 8] [--scrapes 8] [--image NAME] [--config JSON]

Prints one JSON object: start_all_s, idle_cpu_ms_per_s, runtime_idle_cpu_ms_per_s, rss_kib, pss_kib, anon_kib,
scrape_cpu_ms (/metrics/cadvisor and /stats/summary once, above idling), restart_ms (list, container exit -> next container's first
instruction), stop_all_s.
The same manifests, the same runtime and the same KubeletConfiguration go to whichever kubelet is named, so two
runs, one after the other, compare two kubelets. Ports are free ones of this host; --config can name others, and a cgroupRoot.
"""
import argparse, glob, json, os, shutil, signal, socket, subprocess, sys, time, urllib.request
p = argparse.ArgumentParser()
p.add_argument('--kubelet', required=True); p.add_argument('--containerd', required=True); p.add_argument('--containerd-pid', type=int, default=0)
p.add_argument('--ctr', default='ctr'); p.add_argument('--work', required=True)
p.add_argument('--pods', type=int, default=30); p.add_argument('--idle', type=int, default=30); p.add_argument('--restarts', type=int, default=8)
p.add_argument('--scrapes', type=int, default=8); p.add_argument('--image', default='lab.test/busybox:1'); p.add_argument('--timeout', type=int, default=300)
p.add_argument('--config', default='', help='JSON merged into the KubeletConfiguration'); p.add_argument('--arg', action='append', default=[])
a = p.parse_args()
W = os.path.abspath(a.work); M = W + '/manifests'; OUT = W + '/out'
shutil.rmtree(M, True); shutil.rmtree(OUT, True); os.makedirs(M); os.makedirs(OUT); os.makedirs(W + '/root', exist_ok=True)
def free():
    with socket.socket() as s: s.bind(('127.0.0.1', 0)); return s.getsockname()[1]
cfg = {'apiVersion': 'kubelet.config.k8s.io/v1beta1', 'kind': 'KubeletConfiguration', 'containerRuntimeEndpoint': 'unix://' + a.containerd,
       'staticPodPath': M, 'fileCheckFrequency': '1s', 'cgroupDriver': 'cgroupfs', 'failCgroupV1': False, 'failSwapOn': False, 'maxPods': 500,
       'podsPerCore': 0, 'authentication': {'anonymous': {'enabled': True}, 'webhook': {'enabled': False}}, 'authorization': {'mode': 'AlwaysAllow'},
       'readOnlyPort': free(), 'healthzPort': free(), 'port': free(), 'podLogsDir': W + '/podlogs', 'evictionHard': {'memory.available': '100Mi', 'nodefs.available': '1%', 'nodefs.inodesFree': '1%', 'imagefs.available': '1%'},
       'imageGCHighThresholdPercent': 100}
cfg.update(json.loads(a.config or '{}'))
json.dump(cfg, open(W + '/config.json', 'w'))
log = open(W + '/kubelet.log', 'ab')
k = subprocess.Popen([a.kubelet, '--config', W + '/config.json', '--root-dir', W + '/root', '--v', '2'] + a.arg, stdout=log, stderr=log)
def die(m): k.kill(); k.wait(); sys.exit('nodebench: ' + m + '; the log: ' + W + '/kubelet.log')
def get(path, port=cfg['readOnlyPort']):
    try: return urllib.request.urlopen(f'http://127.0.0.1:{port}{path}', timeout=5).read()
    except Exception: return b''
def pods():
    try: return json.loads(get('/pods') or b'{}').get('items') or []
    except ValueError: return []
def wait(what, f, t=a.timeout, step=.05):
    t0 = time.time()
    while time.time() - t0 < t:
        if k.poll() is not None: die(f'kubelet exited {k.returncode} while waiting for {what}')
        if f(): return time.time() - t0
        time.sleep(step)
    die(f'timed out waiting for {what}')
def pod(name, script, extra=None):
    d = {'apiVersion': 'v1', 'kind': 'Pod', 'metadata': {'name': name, 'namespace': 'default'}, 'spec': {'terminationGracePeriodSeconds': 1, 'restartPolicy': 'Always',
         'containers': [{'name': 'c', 'image': a.image, 'imagePullPolicy': 'IfNotPresent', 'command': ['sh', '-c', script], 'volumeMounts': [{'name': 'out', 'mountPath': '/out'}]}],
         'volumes': [{'name': 'out', 'hostPath': {'path': OUT}}]}}
    tmp = f'{W}/.{name}.json'; json.dump(d, open(tmp, 'w')); os.rename(tmp, f'{M}/{name}.json')
def ticks(pid):
    f = open(f'/proc/{pid}/stat').read().rsplit(')', 1)[1].split(); return (int(f[11]) + int(f[12])) * 1000 // os.sysconf('SC_CLK_TCK')
def mem(pid):
    r = {}
    for l in open(f'/proc/{pid}/smaps_rollup'):
        for key, n in (('Rss:', 'rss_kib'), ('Pss:', 'pss_kib'), ('Anonymous:', 'anon_kib')):
            if l.startswith(key): r[n] = int(l.split()[1])
    return r
def containers():
    return subprocess.run([a.ctr, '-a', a.containerd, '-n', 'k8s.io', 'tasks', 'ls', '-q'], capture_output=True, text=True).stdout.split()
R = {'kubelet': a.kubelet, 'pods': a.pods}
wait('healthz', lambda: get('/healthz', cfg['healthzPort']) == b'ok')
if containers(): wait('old containers to be cleaned up', lambda: not containers())
R['empty'] = mem(k.pid)
up = lambda: float(open('/proc/uptime').read().split()[0])
t0 = up()
for i in range(a.pods): pod(f'p{i:03d}', f'cat /proc/uptime > /out/start-{i}; exec sleep 1000000')
wait('all pods to start', lambda: len(glob.glob(OUT + '/start-*')) == a.pods)
starts = sorted(float(open(f).read().split()[0]) - t0 for f in glob.glob(OUT + '/start-*'))
R['start_first_s'], R['start_all_s'] = round(starts[0], 2), round(starts[-1], 2)
running = lambda: sum(x.get('status', {}).get('phase') == 'Running' for x in pods())
R['status_all_running_s'] = round(up() - t0 if wait('all Running in /pods', lambda: running() >= a.pods) is not None else 0, 2)
time.sleep(5)
c0, r0, s0 = ticks(k.pid), ticks(a.containerd_pid) if a.containerd_pid else 0, time.time()
time.sleep(a.idle)
el = time.time() - s0
R['idle_cpu_ms_per_s'] = round((ticks(k.pid) - c0) / el, 2)
if a.containerd_pid: R['runtime_idle_cpu_ms_per_s'] = round((ticks(a.containerd_pid) - r0) / el, 2)
R.update(mem(k.pid))
# Further apart than either kubelet shares one collection of figures among those who ask.
c0, s0 = ticks(k.pid), time.time()
for i in range(a.scrapes):
    if not (get('/metrics/cadvisor') and get('/stats/summary')): die('a page of figures does not come')
    time.sleep(3)
if a.scrapes: R['scrape_cpu_ms'] = round(max(0, ticks(k.pid) - c0 - R['idle_cpu_ms_per_s'] * (time.time() - s0)) / a.scrapes, 2)
for i in range(a.restarts):
    pod(f'r{i:03d}', f'cat /proc/uptime >> /out/r-{i}; while [ ! -e /out/go-{i} ]; do sleep 0.01; done; rm /out/go-{i}; cat /proc/uptime > /out/x-{i}; exit 1')
lines = lambda i: open(f'{OUT}/r-{i}').read().split('\n')[:-1] if os.path.exists(f'{OUT}/r-{i}') else []
wait('restart pods', lambda: all(lines(i) for i in range(a.restarts)))
time.sleep(3)
ms = []
for i in range(a.restarts):
    open(f'{OUT}/go-{i}', 'w').close()
    wait('a restart', lambda: len(lines(i)) >= 2, step=.005)
    ms.append(round((float(lines(i)[1].split()[0]) - float(open(f'{OUT}/x-{i}').read().split()[0])) * 1000))
    time.sleep(.37)
R['restart_ms'] = sorted(ms)
t0 = time.time()
for f in glob.glob(M + '/*.json'): os.unlink(f)
wait('all containers to go', lambda: not containers(), step=.2)
R['stop_all_s'] = round(time.time() - t0, 2)
R['after'] = mem(k.pid)
k.send_signal(signal.SIGTERM)
try: k.wait(20)
except subprocess.TimeoutExpired: k.kill(); R['stop'] = 'had to be killed'
print(json.dumps(R))
