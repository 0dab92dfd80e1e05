# Sourced inside the VM: a node to be. $DRV cgroupfs|systemd, $IMAGES folder of pause.tar and busybox.tar, $KUBELET the program, $CONFIG more lines for its
# configuration. Gives start_containerd, start_kubelet, stop_kubelet, get PORT PATH; works in /run/k, manifests go to /run/k/pods.
up() { read -r a _ < /proc/uptime; echo "[up $a] $1" >&2; }
get() { { exec 3<> "/dev/tcp/127.0.0.1/$1"; } 2> /dev/null || return; printf 'GET %s HTTP/1.0\r\n\r\n' "$2" >&3; sed '1,/^\r*$/d' <&3; exec 3>&-; }
DRV=${DRV:-cgroupfs}; SD=false; [ $DRV = systemd ] && SD=true
mkdir -p /run/k/cni /run/k/pods /run/containerd; cd /run/k || exit
# The Go kubelet does not start without a clock rate, which this kernel does not tell.
grep -q MHz /proc/cpuinfo || { sed 's/^bogomips/cpu MHz\t\t: 2445.000\nbogomips/' /proc/cpuinfo > cpuinfo; mount --bind cpuinfo /proc/cpuinfo; }
# Scores (oom_score_adj) are parts of the memory, and how much of it the kernel keeps for itself differs between machines.
sed 's/^MemTotal:.*/MemTotal:        2041324 kB/' /proc/meminfo > meminfo; mount --bind meminfo /proc/meminfo
cat > cni/10.conflist <<E
{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"bridge","bridge":"cni0","isGateway":true,"ipMasq":false,"ipam":{"type":"host-local","ranges":[[{"subnet":"10.88.0.0/16"}]],"routes":[{"dst":"0.0.0.0/0"}]}}]}
E
cat > containerd.toml <<E
version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "lab.test/pause:1"
  restrict_oom_score_adj = false
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = $SD
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "/run/k/cni"
E
cat > kubelet.yaml <<E
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
cgroupDriver: $DRV
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
staticPodPath: /run/k/pods
fileCheckFrequency: 1s
readOnlyPort: 10255
failSwapOn: false
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}, x509: {}}
authorization: {mode: AlwaysAllow}
evictionHard: {${EVICT:-memory.available: 50Mi}, nodefs.available: 1%, nodefs.inodesFree: 1%}
runtimeRequestTimeout: 2m0s
makeIPTablesUtilChains: false
${CONFIG:-}
E
start_containerd() {
  containerd -c containerd.toml > containerd.log 2>&1 & until ctr version > /dev/null 2>&1; do sleep 0.2; done; up "containerd ready"
  for i in pause busybox; do ctr -n k8s.io images import "$IMAGES/$i.tar" > /dev/null || return; done; up "images imported"; }
start_kubelet() { # until it answers
  $KUBELET --config kubelet.yaml --hostname-override n1 --v="${V:-2}" >> kubelet.log 2>&1 & K=$!
  until [ "$(get 10248 /healthz)" = ok ]; do kill -0 $K 2> /dev/null || { up "the kubelet ended:"; tail -5 kubelet.log | cut -c1-600 >&2; return 1; }; sleep 0.3; done; up "kubelet healthy"; }
stop_kubelet() { kill $K; wait $K; up "kubelet stopped, status $?"; }
