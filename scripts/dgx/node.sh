#!/usr/bin/env bash
# One machine's part of a run that launch.sh starts:  node.sh ID MACHINES NUMBER HOST:PORT WORDS...
set -uo pipefail
id=$1 machines=$2 number=$3 rendezvous=$4
shift 4

pidfile=/tmp/$id-$number.pid
echo $$ >"$pidfile"
trap 'rm -f "$pidfile"' EXIT
# torchrun hands SIGTERM on, and kills what is left after 30 seconds, too few for a large checkpoint; torch 2.11 knows no other.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$GRACE
# A new store for each restart: a shared one still holds the addresses of the processes that are gone (torch 2.13).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
trap 'stopped=1; kill -TERM "$torchrun"' TERM
stopped=0

"$PYTHON" -m torch.distributed.run --nnodes="$machines" --nproc-per-node="$GPUS" --rdzv-id="$id" --rdzv-backend=c10d \
  --rdzv-endpoint="$rendezvous" --max-restarts="$MAX_RESTARTS" \
  -m nvfp4_train.pretrain "$@" &
torchrun=$!
while true; do
  wait "$torchrun"
  code=$?
  kill -0 "$torchrun" 2>/dev/null || break
done
[ "$stopped" -eq 1 ] && exit 75
exit "$code"
