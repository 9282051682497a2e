#!/usr/bin/env bash
# Train on a list of machines without a scheduler, from the repository's root on one of them:
#
#   scripts/dgx/launch.sh hosts.txt +experiment=12b_hybrid training.global_batch_size=768 run_dir=/shared/runs/12b data.source=/shared/data
#
# hosts.txt: one name a line, reachable by ssh without a password, the first one hosts the rendezvous; the repository lies
# at the same path on each. SIGTERM or Ctrl-C here stops the run everywhere: it saves, and this script exits with 75
# (start it again to go on). Settings, as environment variables:
#
#   GPUS          processes a machine (8)
#   PYTHON        interpreter with the package (.venv/bin/python in the repository)
#   PORT          of the rendezvous on the first machine (29400)
#   MAX_RESTARTS  of the processes after a failure, from the last checkpoint (100)
#   GRACE         seconds that a stopped run has for saving (300)
#   RSH           the remote shell, called as: RSH HOST COMMAND (ssh)
set -uo pipefail

hosts_file=${1:?a file with one host a line}
shift
root=$PWD
mapfile -t hosts < <(grep -v '^[[:space:]]*\(#\|$\)' "$hosts_file")
rsh=${RSH:-ssh}
id=run-$$-$(date +%s)
environment="GPUS=${GPUS:-8} PYTHON=${PYTHON:-$root/.venv/bin/python} MAX_RESTARTS=${MAX_RESTARTS:-100} GRACE=${GRACE:-300}"
stopped=0

# Our words for the other side's shell.
words=$(printf ' %q' "$@")

# shellcheck disable=SC2329 # called by the trap
stop() {
  stopped=1
  for host in "${hosts[@]}"; do
    "$rsh" "$host" "kill -TERM \$(cat /tmp/$id-*.pid)" &
  done
}
trap stop TERM INT

pids=()
for i in "${!hosts[@]}"; do
  "$rsh" "${hosts[$i]}" "cd $(printf %q "$root") && env $environment bash scripts/dgx/node.sh $id ${#hosts[@]} $i \
    ${hosts[0]}:${PORT:-29400}$words" &
  pids+=($!)
done

code=0
for pid in "${pids[@]}"; do
  # A signal ends `wait` early: wait again for what is still running.
  while true; do
    wait "$pid"
    one=$?
    kill -0 "$pid" 2>/dev/null || break
  done
  [ "$one" -gt "$code" ] && code=$one
done
[ "$stopped" -eq 1 ] && exit 75
exit "$code"
