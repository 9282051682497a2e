#!/usr/bin/env bash
# Transformer Engine's FP8 recipes on one Hopper or Blackwell GPU that has it:  scripts/te_fp8.sh DATA [PART ...] [key=value ...]
#
#   tests     its tests, and the refusal of its NVFP4 recipe before Blackwell
#   compare   125m_hybrid for 200 steps in BF16, our FP8 and each of its recipes: one table of losses and speeds (an arm that
#             is there already is not trained again)
#   resume    after compare: a delayed-scaling run stopped after 60 steps and resumed, whose 120 losses must equal, bit for
#             bit, those of compare's, which nothing stopped
#
# All of them without a PART. Each training run takes a minute or two.
set -euo pipefail
cd "$(dirname "$0")/.."
data=${1:?the text to train on: a folder, a file or a prepared data set}; shift
parts=()
while [[ ${1:-} =~ ^(tests|compare|resume)$ ]]; do parts+=("$1"); shift; done
[[ ${#parts[@]} -gt 0 ]] || parts=(tests compare resume)
python=${PYTHON:-python}
out=runs/te
common=(+experiment=125m_hybrid "data.source=$data" training.global_batch_size=32 training.micro_batch_size=16
  training.sample_tokens=0 "$@")

tests() {
  "$python" -m pytest -m gpu tests/precision/test_te_gpu.py
  if "$python" -m nvfp4_train.pretrain "${common[@]}" precision=nvfp4 precision.backend=te training.max_steps=1 run_dir=$out/nvfp4; then
    echo "precision=nvfp4 precision.backend=te runs on this GPU"
  else
    echo "precision=nvfp4 precision.backend=te is refused: exit code $?"
  fi
}

compare() {
  "$python" -m nvfp4_train.compare out=$out "${common[@]}" training.max_steps=200 \
    "arms=[bf16,fp8,fp8:backend=te:te_recipe=delayed,fp8:backend=te:te_recipe=current,fp8:backend=te:te_recipe=block]"
}

resume() {
  local delayed=(precision=fp8 precision.backend=te precision.te_recipe=delayed "run_dir=$out/resumed")
  "$python" -m nvfp4_train.pretrain "${common[@]}" "${delayed[@]}" training.max_steps=60
  "$python" -m nvfp4_train.pretrain "${common[@]}" "${delayed[@]}" training.max_steps=120
  "$python" - $out/fp8-backend_te-te_recipe_delayed $out/resumed <<'PY'
import sys
from pathlib import Path
from nvfp4_train.training.metrics import read_metrics
whole, resumed = ([r["loss"] for r in read_metrics(Path(run) / "metrics.jsonl") if "loss" in r] for run in sys.argv[1:])
differing = [i for i, (a, b) in enumerate(zip(whole, resumed), 1) if a != b]
assert len(resumed) == 120 and not differing, f"losses of {len(resumed)} steps, different at {differing[:5]}"
print(f"resumed: {len(resumed)} losses, bit-equal")
PY
}

for part in "${parts[@]}"; do "$part"; done
