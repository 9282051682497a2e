#!/usr/bin/env bash
# Transformer Engine's FP8 recipes on one Hopper or Blackwell GPU that has it:  scripts/te_fp8.sh DATA [key=value ...]
#
# Its tests; the refusal of its NVFP4 recipe before Blackwell; 125m_hybrid for 200 steps in BF16, our FP8 and each of its
# recipes, as one table of losses and speeds; a delayed-scaling run stopped after 60 steps and resumed, whose losses must
# equal, bit for bit, those of one that nothing stopped.
set -euo pipefail
cd "$(dirname "$0")/.."
data=${1:?the text to train on: a folder, a file or a prepared data set}; shift
python=${PYTHON:-python}
common=(+experiment=125m_hybrid "data.source=$data" training.global_batch_size=32 training.micro_batch_size=16 "$@")

"$python" -m pytest -m gpu tests/precision/test_te_gpu.py

if "$python" -m nvfp4_train.pretrain "${common[@]}" precision=nvfp4 precision.backend=te training.max_steps=1 run_dir=runs/te/nvfp4; then
  echo "precision=nvfp4 precision.backend=te runs on this GPU"
fi

"$python" -m nvfp4_train.compare out=runs/te "${common[@]}" training.max_steps=200 \
  "arms=[bf16,fp8,fp8:backend=te:te_recipe=delayed,fp8:backend=te:te_recipe=current,fp8:backend=te:te_recipe=block]"

delayed=(precision=fp8 precision.backend=te precision.te_recipe=delayed checkpoint.every_steps=60)
"$python" -m nvfp4_train.pretrain "${common[@]}" "${delayed[@]}" training.max_steps=120 run_dir=runs/te/whole
"$python" -m nvfp4_train.pretrain "${common[@]}" "${delayed[@]}" training.max_steps=60 run_dir=runs/te/resumed
"$python" -m nvfp4_train.pretrain "${common[@]}" "${delayed[@]}" training.max_steps=120 run_dir=runs/te/resumed
"$python" - <<'PY'
from pathlib import Path
from nvfp4_train.training.metrics import read_metrics
losses = [[r["loss"] for r in read_metrics(Path(f"runs/te/{run}/metrics.jsonl")) if "loss" in r] for run in ("whole", "resumed")]
assert losses[0] == losses[1], [i for i, (a, b) in enumerate(zip(*losses)) if a != b][:5]
print(f"resumed: {len(losses[0])} losses, bit-equal")
PY
