from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4_train.errors import CheckpointError, UserError
from nvfp4_train.training.metrics import DeviceMetrics, MetricsWriter, read_metrics, truncate_after

floats32 = st.floats(width=32, allow_nan=True, allow_infinity=True)


def same(a: float, b: float) -> bool:
    return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (math.isnan(a) and math.isnan(b))


@settings(max_examples=50, deadline=None)
@given(values=st.lists(st.tuples(floats32, st.floats()), min_size=1, max_size=20))
def test_every_float_survives_the_file(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("m") / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"step": i, "loss": a, "nested": {"x": [b]}} for i, (a, b) in enumerate(values))
    records = read_metrics(path)
    assert all(
        same(r["loss"], a) and same(r["nested"]["x"][0], b) for r, (a, b) in zip(records, values, strict=True)
    )
    for line in path.read_text().splitlines():  # any strict JSON reader accepts it
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_events_and_steps_share_the_file_in_order(tmp_path):
    with MetricsWriter(tmp_path / "m.jsonl") as writer:
        writer.write([{"step": 1, "loss": 2.0}])
        writer.event("spike", step=1, loss=9.0)
        assert len(read_metrics(tmp_path / "m.jsonl")) == 2  # visible at once, before close
    assert read_metrics(tmp_path / "m.jsonl")[1] == {"event": "spike", "step": 1, "loss": 9.0}


@pytest.mark.parametrize("tail", [b'{"step": 3, "lo', b'{"step": 3}', b"\0" * 70000])
def test_torn_last_line_is_ignored_then_cut(tmp_path, tail):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + tail)
    assert [r["step"] for r in read_metrics(path)] == [1, 2]
    with MetricsWriter(path) as writer:
        writer.write([{"step": 3}])
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_file_of_one_torn_line_becomes_empty(tmp_path):
    (tmp_path / "m.jsonl").write_bytes(b'{"st')
    MetricsWriter(tmp_path / "m.jsonl").close()
    assert (tmp_path / "m.jsonl").read_bytes() == b""


@pytest.mark.parametrize("bad", [b"garbage\n", b"[1]\n"])
def test_damage_in_the_middle_is_named(tmp_path, bad):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n' + bad + b'{"step": 2}\n')
    with pytest.raises(CheckpointError, match=r"Line 2 of .*m\.jsonl"):
        read_metrics(path)


def test_truncate_drops_later_steps_and_their_events(tmp_path):
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path) as writer:
        writer.event("start")
        writer.write([{"step": s, "loss": 0.1 * s} for s in (1, 2)])
        writer.event("checkpoint", step=2)
        writer.event("note")  # no step: belongs to step 2
        writer.write([{"step": 3}])
        writer.event("note")  # belongs to step 3
    kept = path.read_bytes().splitlines(keepends=True)[:5]
    assert truncate_after(path, 2) == 2
    assert path.read_bytes() == b"".join(kept)
    assert truncate_after(path, 2) == 0
    assert truncate_after(tmp_path / "absent.jsonl", 2) == 0


def test_killed_writer_leaves_a_readable_file(tmp_path):
    path = tmp_path / "m.jsonl"
    code = (
        "import sys; from nvfp4_train.training.metrics import MetricsWriter\n"
        "w = MetricsWriter(sys.argv[1])\n"
        "for s in range(10**9): w.write([{'step': s, 'loss': s / 7}])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not path.exists() or path.stat().st_size < 10000):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    records = read_metrics(path)
    assert len(records) > 50
    assert [r["step"] for r in records] == list(range(len(records)))
    assert all(r["loss"] == r["step"] / 7 for r in records)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_is_one_sentence():
    with pytest.raises(UserError, match="No space left on device"):
        MetricsWriter("/dev/full").write([{"step": 1}])


def test_device_metrics_are_exact_and_typed():
    metrics = DeviceMetrics()
    loss = torch.tensor(1 / 3)
    for step in (1, 2):
        loss.mul_(2)  # overwritten in place by the next step
        metrics.add({"step": step}, {"loss": loss, "n": torch.tensor(2**53 - 1), "ok": torch.tensor(True)})
    a, b = metrics.read()
    assert a == {"step": 1, "loss": float(torch.tensor(1 / 3) * 2), "n": 2**53 - 1, "ok": True}
    assert b["loss"] == float(torch.tensor(1 / 3) * 4)
    assert (type(a["n"]), type(a["ok"])) == (int, bool)
    assert metrics.read() == []


def test_add_never_reads_the_device():
    # meta tensors hold no data: anything that looked at a value would raise
    metrics = DeviceMetrics()
    metrics.add({"step": 1}, {"loss": torch.empty((), device="meta"), "norm": torch.empty(1, device="meta")})
    assert len(metrics) == 1
    with pytest.raises(NotImplementedError):
        metrics.read()
