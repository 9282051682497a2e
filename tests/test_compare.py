"""`python -m nvfp4_train.compare` on two arms of a tiny model, and what it refuses."""

import subprocess
import sys
from pathlib import Path

import pytest

from nvfp4_train.compare import arm_overrides, folder_name, main, parse_arms
from nvfp4_train.errors import ConfigError
from tests.tiny import TINY

ROOT = Path(__file__).parents[1]


def test_two_arms_are_trained_and_compared(tmp_path):
    (tmp_path / "text").mkdir()
    for source in sorted((ROOT / "tests").glob("test_[a-g]*.py")):
        (tmp_path / "text" / source.name).write_bytes(source.read_bytes())
    words = [
        *TINY,
        "training.max_tokens=1024",
        "schedule.warmup_tokens=256",
        f"data.source={tmp_path / 'text'}",
        f"data.cache_dir={tmp_path / 'cache'}",
        "data.valid_fraction=0.2",
        "arms=[fp8,mxfp4:hadamard=false]",
        f"out={tmp_path / 'out'}",
    ]
    command = [sys.executable, "-m", "nvfp4_train.compare", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    table = (tmp_path / "out" / "comparison.txt").read_text()
    assert table.strip() in done.stdout
    first, second = table.splitlines()[1:]
    assert first.startswith("fp8 ")
    assert second.startswith("mxfp4:hadamard=false ")
    assert "%" in second
    assert "%" not in first
    assert (tmp_path / "out" / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out" / "mxfp4-hadamard_false" / "metrics.jsonl").exists()


def test_arms_as_words():
    assert parse_arms("[bf16, nvfp4,fp8]") == ["bf16", "nvfp4", "fp8"]
    assert arm_overrides("nvfp4:backward=ms_eden:weight_blocks_2d=false") == [
        "precision=nvfp4",
        "precision.backward=ms_eden",
        "precision.weight_blocks_2d=false",
    ]
    assert folder_name("nvfp4:backward=ms_eden") == "nvfp4-backward_ms_eden"


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        ("[nvfp4]", "at least two different arms"),
        ("[nvfp4,nvfp4]", "at least two different arms"),
        ("[nvfp4,bf16:fast]", "'fast', which is not of the form key=value"),
        ("[bf16,int4]", "int4"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_trained(arms, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        main([*TINY, f"arms={arms}", f"out={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()
