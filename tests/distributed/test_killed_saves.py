"""The first of two ranks, which publishes, is killed in a save, and the next launch goes on: scripts/kill_saves.py.

The script tries every operation; here are one of publishing and one of deleting the older checkpoint. All traffic is
in 4 bits, so this is also the resume of such a run at its own number of ranks, bit by bit.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.text import data_words
from tests.tiny import TINY

SCRIPT = Path(__file__).parents[2] / "scripts" / "kill_saves.py"
RESUMES_FROM = {"-> step_00000008": 4, "os.remove __": 8}


def test_the_publishing_rank_is_killed_and_the_run_goes_on_bit_for_bit(tmp_path):
    own = ("training.log_every", "training.validate_every", "training.sample_tokens", "checkpoint.")
    words = [word for word in TINY if not word.startswith(own)]
    words += [
        "model.pattern=M-",
        "parallel.weight_gather=nvfp4",
        "parallel.grad_reduce=nvfp4",
        *data_words(tmp_path),
    ]
    chosen = [f"--like={text}" for text in RESUMES_FROM]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path / "out"), *chosen, *words],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    trials = [line for line in done.stdout.splitlines() if "exit codes [-9, " in line]
    assert len(trials) == len(RESUMES_FROM)
    for line, (text, step) in zip(trials, RESUMES_FROM.items(), strict=True):
        assert text in line
        assert f"resumed from {step}, losses equal" in line
