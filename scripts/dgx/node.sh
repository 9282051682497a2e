#!/usr/bin/env bash
# One machine's part of a run that launch.sh starts:  node.sh ID ATTEMPT MACHINES NUMBER HOST:PORT WORDS...
set -uo pipefail
id=$1 attempt=$2 machines=$3 number=$4 rendezvous=$5
shift 5
pidfile=/tmp/$id-$number.pid stopfile=/tmp/$id-$attempt-$number.stop
stopped=0 torchrun=''

# torchrun hands the signal on, once: a second one would break off its waiting.
# shellcheck disable=SC2329 # called by the trap
stop() {
  [ "$stopped" -eq 1 ] || [ -z "$torchrun" ] || kill -TERM "$torchrun"
  stopped=1
}

# The start before may have lost its connection, but not yet its processes.
if old=$(cat "$pidfile" 2>/dev/null) && kill -TERM "$old" 2>/dev/null; then
  while kill -0 "$old" 2>/dev/null; do sleep 1; done
fi
trap 'rm -f "$pidfile" "$stopfile"' EXIT
trap stop TERM
echo $$ >"$pidfile"
[ -e "$stopfile" ] && exit 75

# torchrun kills what is left after 30 seconds, too few for a large checkpoint; torch 2.11 knows no other.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$GRACE
# launch.sh starts again: a failure on one machine ends all of them, and only all codes together tell a failure from a stop.
"$PYTHON" -m nvfp4_train.torchrun --nnodes="$machines" --nproc-per-node="$GPUS" --rdzv-id="$id-$attempt" --rdzv-backend=c10d \
  --rdzv-endpoint="$rendezvous" --max-restarts=0 -m nvfp4_train.pretrain "$@" &
torchrun=$!
[ "$stopped" -eq 0 ] || kill -TERM "$torchrun"
while true; do
  wait "$torchrun"
  code=$?
  kill -0 "$torchrun" 2>/dev/null || break
done
[ "$stopped" -eq 1 ] && exit 75
exit "$code"
