#!/usr/bin/env bash
# Train on a list of machines without a scheduler, from the repository's root on one of them:
#
#   scripts/dgx/launch.sh hosts.txt +experiment=12b_hybrid training.global_batch_size=768 run_dir=/shared/runs/12b data.source=/shared/data
#
# hosts.txt: one name a line, reachable by ssh without a password, the first one hosts the rendezvous; the repository lies
# at the same path on each. After a failure all machines are started again from the last checkpoint. Exit codes are
# pretrain's (docs/operations.md); 2, 75 and 76 end the run everywhere. SIGTERM or Ctrl-C here stops it everywhere: it saves,
# and this script exits with 75 (start it again to go on). Settings, as environment variables:
#
#   GPUS          processes a machine (8)
#   PYTHON        interpreter with the package (.venv/bin/python in the repository)
#   PORT          of the rendezvous on the first machine (29400)
#   MAX_RESTARTS  starts after the first one (100), PAUSE  seconds before each of them (10)
#   PATIENCE      seconds that the other machines have to end by themselves after one has failed (120)
#   GRACE         seconds that a stopped run has for saving (300)
#   RSH           the remote shell, called as: RSH HOST COMMAND (ssh, which gives up a machine that is silent for 90 seconds)
set -uo pipefail

hosts_file=${1:?a file with one host a line}
shift
root=$PWD
mapfile -t hosts < <(grep -v '^[[:space:]]*\(#\|$\)' "$hosts_file")
read -ra rsh <<<"${RSH:-ssh -o BatchMode=yes -o ServerAliveInterval=30 -o ServerAliveCountMax=3}"
id=run-$$-$(date +%s)
environment="GPUS=${GPUS:-8} PYTHON=${PYTHON:-$root/.venv/bin/python} GRACE=${GRACE:-300}"
max_restarts=${MAX_RESTARTS:-100}
stopped=0 attempt=0 pids=()

# Our words for the other side's shell.
words=$(printf ' %q' "$@")

say() { echo "$(date -u +%H:%M:%S) $id: $*"; }

# Of those that still run. One that isn't that far yet finds the file.
stop_machines() {
  local i
  for i in "${!pids[@]}"; do
    "${rsh[@]}" "${hosts[$i]}" "touch /tmp/$id-$attempt-$i.stop; kill -TERM \$(cat /tmp/$id-$i.pid)" 2>/dev/null &
  done
}

# shellcheck disable=SC2329 # called by the trap
stop() {
  [ "$stopped" -eq 0 ] && stop_machines
  stopped=1
}
trap stop TERM INT

# Start all machines and wait for them. Returns 2 or 76 if one of them did, 75 if all that didn't return 0 did, else
# another one's code.
train() {
  local final=0 code=0 deadline='' one i
  for i in "${!hosts[@]}"; do
    "${rsh[@]}" "${hosts[$i]}" "cd $(printf %q "$root") && env $environment bash scripts/dgx/node.sh $id $attempt ${#hosts[@]} \
      $i ${hosts[0]}:${PORT:-29400}$words" &
    pids[i]=$!
  done
  [ "$stopped" -eq 0 ] || stop_machines # a signal in the middle of that; node.sh heeds the first of two
  while [ "${#pids[@]}" -gt 0 ]; do
    sleep 0.2
    for i in "${!pids[@]}"; do
      kill -0 "${pids[i]}" 2>/dev/null && continue
      wait "${pids[i]}"
      one=$?
      unset "pids[i]"
      [ "$one" -eq 0 ] && continue
      : "${deadline:=$((SECONDS + ${PATIENCE:-120}))}"
      case $one in
        2 | 76) final=$one deadline=$SECONDS ;;
        75) [ "$code" -ne 0 ] || code=75 ;;
        *) code=$one ;;
      esac
    done
    if [ -n "$deadline" ] && [ "$SECONDS" -ge "$deadline" ] && [ "${#pids[@]}" -gt 0 ]; then
      [ "$stopped" -eq 1 ] || stop_machines
      deadline=$((SECONDS + 1000000000)) # once
    fi
  done
  return $((final ? final : code))
}

for ((attempt = 0; attempt <= max_restarts; attempt++)); do
  train
  code=$?
  [ "$stopped" -eq 1 ] && exit 75
  case $code in
    0) exit 0 ;;
    2) say "refused: what the log says needs a person"; exit 2 ;;
    75) say "stopped and saved: the same command goes on"; exit 75 ;;
    76) say "recovery gave up: its report needs a person"; exit 76 ;;
  esac
  [ "$attempt" -eq "$max_restarts" ] && break
  say "ended with $code; going on from the last checkpoint"
  sleep "${PAUSE:-10}" &
  wait $!
  [ "$stopped" -eq 1 ] && exit 75
done
say "gave up after $((max_restarts + 1)) starts"
exit "$code"
