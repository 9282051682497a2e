#!/usr/bin/env bash
# Is this node fit to train?  health.sh GPUS   (0: without GPUs). Prints one line for every fault; exit code 1 if there is one.
set -uo pipefail
gpus=${1:?number of GPUs}
faults=0

fault() {
  echo "$(hostname): $1"
  faults=1
}

if [ "$gpus" -gt 0 ]; then
  seen=$(timeout 30 nvidia-smi --query-gpu=index --format=csv,noheader | grep -c .)
  [ "$seen" -eq "$gpus" ] || fault "$seen of $gpus GPUs answer nvidia-smi"
  # Uncorrected memory errors since the last reset; [N/A] where ECC is off.
  bad=$(timeout 30 nvidia-smi --query-gpu=index,ecc.errors.uncorrected.volatile.total --format=csv,noheader |
    awk -F', ' '$2 + 0 > 0 { print $1 }' | paste -sd' ')
  [ -z "$bad" ] || fault "uncorrected memory errors on GPU $bad: reset or replace it"
  pending=$(timeout 30 nvidia-smi --query-remapped-rows=gpu_bus_id,remapped_rows.pending --format=csv,noheader |
    awk -F', ' '$2 == "Yes" || $2 + 0 > 0 { print $1 }' | paste -sd' ')
  [ -z "$pending" ] || fault "GPU $pending waits for a reset to remap memory rows"
  other=$(timeout 30 nvidia-smi --query-compute-apps=pid --format=csv,noheader | paste -sd' ')
  [ -z "$other" ] || fault "the GPUs are still used by process $other"
fi
free=$(df --output=avail -k "${TMPDIR:-/tmp}" | tail -n 1)
[ "$free" -gt 1048576 ] || fault "less than 1 GiB free in ${TMPDIR:-/tmp}"
exit "$faults"
