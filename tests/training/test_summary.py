from __future__ import annotations

import shlex

import pytest

from nvfp4_train.training.summary import final_summary, more_tokens_command

RUN = {
    "run_dir": "runs/quickstart",
    "steps": 293,
    "tokens": 1_200_128,
    "launch_tokens": 1_200_128,
    "launch_seconds": 120.0,
    "loss": 2.6218,
    "precision": "nvfp4: 10 of 14 linear layers",
    "checkpoint": "runs/quickstart/checkpoints/step_00000293",
}


def test_everything_is_there_and_aligned():
    text = final_summary(
        **RUN,
        plot="runs/quickstart/plots/run.png",
        held_out={"heldout": {"loss": 2.7, "loss_bf16": 2.69, "bits_per_byte": 1.8}},
        baselines={"gzip": 2.04, "xz": 1.69},
        skipped=3,
        prompt="def f(x):",
        sample="def f(x):\n    return \x1b[2J",
        more_command="python -m nvfp4_train.pretrain +experiment=quickstart training.max_tokens=2400000",
    )
    head, sample, go_on = text.split("\n\n")
    lines = head.splitlines()
    assert lines[0] == "Finished"
    assert lines[1] == "  trained        1.20M tokens in 293 steps, 2m 00s (10.0k tok/s)"
    assert lines[2] == "  training loss  2.6218"
    assert lines[3] == "  held-out loss  2.7000  (2.6900 with all layers in BF16: +0.37 %)"
    assert lines[4] == "  bits per byte  1.800"
    assert lines[5] == "                 2.040  gzip -9, each document alone: beaten by 11.8 %"
    assert lines[6] == "                 1.690  xz -9, all together: not beaten, 6.5 % ahead"
    assert "3 updates that were not finite" in head
    assert "plots/run.png" in head
    assert sample == "Sample after 'def f(x):'\n  | def f(x):\n  |     return \\x1b[2J"
    assert "run=runs/quickstart prompt='def f(x):'" in go_on
    assert "training.max_tokens=2400000" in go_on


def test_what_was_not_measured_is_left_out():
    text = final_summary(**RUN)
    for word in ("held-out", "bits per byte", "skipped", "plot", "Sample", "train longer", "None", "nan"):
        assert word not in text


def test_a_resumed_launch_tells_its_own_pace():
    text = final_summary(**RUN | {"launch_tokens": 600_064, "launch_seconds": 60.0})
    assert "1.20M tokens in 293 steps; this launch 600k in 1m 00s (10.0k tok/s)" in text


def test_a_launch_that_found_nothing_left_to_train_says_so():
    text = final_summary(**RUN | {"launch_tokens": 0, "launch_seconds": 0.0})
    assert "1.20M tokens in 293 steps, none of them in this launch" in text


@pytest.mark.parametrize("run_dir", ["runs/my run", "runs/it's", "runs/a=b"])
def test_the_generate_command_can_be_pasted(run_dir):
    command = final_summary(**RUN | {"run_dir": run_dir}, prompt='if x == "[1, 2]":').splitlines()[-1]
    words = shlex.split(command.split("write text")[1])
    assert words == ["python", "-m", "nvfp4_train.generate", f"run={run_dir}", 'prompt=if x == "[1, 2]":']


def test_the_command_for_more_tokens_keeps_the_rest():
    command = more_tokens_command(
        ["+experiment=quickstart", "training.max_tokens=1e6", "+training.max_steps=5", "run_dir=runs/a b"],
        2.4e6,
    )
    assert shlex.split(command)[3:] == [
        "+experiment=quickstart",
        "run_dir=runs/a b",
        "training.max_tokens=2400000",
    ]
