# Sourced by the scripts here; every value can be set from outside.
LAB=${RUBELET_LAB:-${XDG_CACHE_HOME:-$HOME/.cache}/rubelet-lab}
K8S=${K8S:-v1.36.1} K8S_STAGING=${K8S_STAGING:-v0.36.1} ETCD=${ETCD:-v3.6.16} CONTAINERD=${CONTAINERD:-v2.2.9} CRITOOLS=${CRITOOLS:-v1.34.0} METRICS_SERVER=${METRICS_SERVER:-v0.8.0}
BIN=$LAB/bin; HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd); ME=$(basename "$0")
mkdir -p "$BIN"
fail() { echo "$ME: $*" >&2; exit 1; }
# lock: one of this script at a time
lock() { exec 9> "$LAB/.$ME.lock"; flock -n 9 || { echo "$ME: another one is running; waiting for it"; flock 9; }; }
# step TEXT COMMAND…: run COMMAND with its output in $LAB/log/ME; a line with the seconds it took when that is more than one; on failure the log's end.
# The subshell stands alone, not in a condition: there `set -e` would not hold inside COMMAND.
step() {
  local text=$1 t0=$SECONDS rc; shift; mkdir -p "$LAB/log"
  set +e; (set -e; "$@") > "$LAB/log/$ME" 2>&1 < /dev/null; rc=$?; set -e
  [ $rc = 0 ] || { tail -n 20 "$LAB/log/$ME" >&2; fail "$text: failed after $((SECONDS - t0)) s; all of its output: $LAB/log/$ME"; }
  [ $((SECONDS - t0)) -lt 1 ] || echo "$ME: $text: $((SECONDS - t0)) s"; }
