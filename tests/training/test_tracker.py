from __future__ import annotations

import glob
import json
import math
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from nvfp4_train.config.schema import LoggingConfig
from nvfp4_train.errors import ConfigError
from nvfp4_train.training import tracker as tracker_module
from nvfp4_train.training.metrics import MetricsWriter
from nvfp4_train.training.tracker import Tracker, _SinkThread, build_tracker


class Sink:
    def __init__(self, fail_at: int | None = None, seconds: float = 0.0):
        self.rows, self.closed, self.fail_at, self.seconds = [], False, fail_at, seconds

    def log(self, step, values):
        time.sleep(self.seconds)
        if step == self.fail_at:
            raise ConnectionError("the network\nis gone")
        self.rows.append((step, values))

    def close(self):
        self.closed = True


def tracker_of(opener, warnings: list[str]) -> Tracker:
    return Tracker([_SinkThread("wandb", lambda *_: opener(), None, warnings.append)])


def test_rows_arrive_in_order_under_their_names():
    sink, warnings = Sink(), []
    tracker = tracker_of(lambda: sink, warnings)
    tracker.log({"step": 1, "loss": 2.0, "tokens": 4096, "note": "text"})
    tracker.log({"event": "checkpoint", "step": 1})
    tracker.log({"valid/main/loss": 3.0})
    tracker.finish()
    assert sink.rows == [(1, {"loss": 2.0, "tokens": 4096}), (1, {"valid/main/loss": 3.0})]
    assert sink.closed
    assert not warnings


def test_a_rewind_opens_the_tracker_anew_at_that_step():
    sinks, opened = [Sink(), Sink()], []

    def open_next(*at):
        opened.append(at)
        return sinks[len(opened) - 1]

    tracker = Tracker([_SinkThread("wandb", open_next, 3, [].append)])
    for step in (4, 5, 6):
        tracker.log({"step": step, "loss": 9.0})
    tracker.rewind(4)
    tracker.log({"step": 5, "loss": 2.0})
    tracker.finish()
    assert opened == [(3, False), (4, True)]
    assert sinks[0].closed
    assert [step for step, _ in sinks[0].rows] == [4, 5, 6]
    assert sinks[1].rows == [(5, {"loss": 2.0})]


def failing_open():
    raise ModuleNotFoundError("No module named 'wandb'")


@pytest.mark.parametrize("opener", [failing_open, lambda: Sink(fail_at=3)])
def test_a_failing_tracker_warns_once_and_stops_nothing(opener):
    warnings = []
    tracker = tracker_of(opener, warnings)
    for step in range(10):
        tracker.log({"step": step, "loss": 1.0})
        time.sleep(0.005)
    tracker.finish()
    assert len(warnings) == 1
    assert "No module named 'wandb'" in warnings[0] or "the network is gone" in warnings[0]
    assert "metrics.jsonl has them all" in warnings[0]


def test_a_slow_tracker_costs_a_step_nothing(monkeypatch):
    monkeypatch.setattr(tracker_module, "_FINISH_SECONDS", 0.2)
    monkeypatch.setattr(tracker_module, "_MAX_WAITING_ROWS", 50)
    warnings, hang = [], threading.Event()
    tracker = tracker_of(lambda: hang.wait(30) and Sink(), warnings)
    started = time.monotonic()
    for step in range(1000):
        tracker.log({"step": step, "loss": 1.0})
    tracker.finish()
    assert time.monotonic() - started < 1.0
    assert warnings == [
        "wandb gets no more rows (it is 50 rows behind); training goes on, metrics.jsonl has them all."
    ]
    hang.set()


def test_finish_waits_a_little_and_no_longer(monkeypatch):
    monkeypatch.setattr(tracker_module, "_FINISH_SECONDS", 0.3)
    warnings = []
    tracker = tracker_of(lambda: Sink(seconds=0.2), warnings)
    for step in range(100):
        tracker.log({"step": step})
    started = time.monotonic()
    tracker.finish()
    assert 0.2 < time.monotonic() - started < 1.0
    assert "within 0 s" in warnings[0]


def test_unknown_mode_is_refused_and_off_is_free(tmp_path):
    with pytest.raises(ConfigError, match=r"logging.wandb='on'.*off, offline, online"):
        build_tracker(LoggingConfig(wandb="on"), "id", tmp_path, {}, None, print)
    tracker = build_tracker(LoggingConfig(), "id", tmp_path, {}, None, print)
    tracker.log({"step": 1})
    tracker.finish()
    assert not list(tmp_path.iterdir())


LAUNCH = """
import sys, time
from nvfp4_train.config.schema import LoggingConfig
from nvfp4_train.training.metrics import MetricsWriter, truncate_after
from nvfp4_train.training.tracker import build_tracker
run_dir, mode, first, last, resumed_at, hang = sys.argv[1:7]
resumed_at = None if resumed_at == "-" else int(resumed_at)
tracker = build_tracker(LoggingConfig(wandb=mode), "feedbeef", run_dir, {"model": {"hidden_size": 64}}, resumed_at,
                        lambda text: print("WARN", text, flush=True))
with MetricsWriter(run_dir + "/metrics.jsonl") as metrics:
    for step in range(int(first), int(last) + 1):
        record = {"step": step, "loss": float("nan") if step == 2 else 8.0 / step, "tokens": 64 * step}
        metrics.write([record])
        tracker.log(record)
if hang == "hang":
    time.sleep(1.5)
    print("ready", flush=True)
    time.sleep(60)
tracker.finish()
print("finished", flush=True)
"""


def launch(
    run_dir: Path, mode: str, first: int, last: int, resumed_at: str, hang: str = "", **env
) -> subprocess.Popen:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    args = [str(run_dir), mode, str(first), str(last), resumed_at, hang]
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCH, *args],
        stdout=subprocess.PIPE,
        text=True,
        env=clean | {"HOME": str(run_dir), "WANDB_ERROR_REPORTING": "false"} | env,
    )


def wandb_records(path: str):
    """Reads wandb's transaction log: LevelDB's log format (32 KiB blocks, 7-byte chunk headers) after 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data = Path(path).read_bytes()
    position, message = 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        message += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            message = b""
            yield record


def logged(path: str) -> list[dict]:
    rows = []
    for record in wandb_records(path):
        if record.HasField("history"):
            items = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
            rows.append(items | {"_step": record.history.step.num})
    return rows


def test_wandb_offline_has_every_step_once_after_a_kill_and_a_resume(tmp_path):
    first = launch(tmp_path, "offline", 1, 6, "-", "hang")
    assert first.stdout.readline() == "ready\n"
    first.send_signal(signal.SIGKILL)
    first.wait()
    # The checkpoint was at step 4: a resume drops the later rows.
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:4]))
    second = launch(tmp_path, "offline", 5, 9, "4")
    assert second.communicate()[0] == "finished\n"

    newest = max(glob.glob(f"{tmp_path}/wandb/offline-run-*-feedbeef/run-feedbeef.wandb"))
    rows = logged(newest)
    assert [row["step"] for row in rows] == [row["_step"] for row in rows] == list(range(1, 10))
    assert rows[0]["loss"] == 8.0
    assert math.isnan(float(rows[1]["loss"]))
    configs = [r.run.config.update for r in wandb_records(newest) if r.HasField("run")]
    assert any(
        u.key == "model" and json.loads(u.value_json) == {"hidden_size": 64} for c in configs for u in c
    )


def test_wandb_online_without_a_login_asks_nothing_and_warns_once(tmp_path):
    process = launch(tmp_path, "online", 1, 50, "-")
    out, _ = process.communicate(timeout=240)
    warnings = [line for line in out.splitlines() if line.startswith("WARN")]
    assert len(warnings) == 1
    assert "API key" in warnings[0]
    assert out.endswith("finished\n")
    assert process.returncode == 0


def test_tensorboard_warns_where_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    warnings = []
    tracker = build_tracker(LoggingConfig(tensorboard=True), "id", tmp_path, {}, None, warnings.append)
    tracker.log({"step": 1, "loss": 1.0})
    tracker.finish()
    assert len(warnings) == 1
    assert "pip install tensorboard" in warnings[0]


def test_tensorboard_shows_every_step_once_after_a_resume(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resumed_at, steps in ((None, range(1, 7)), (4, range(5, 10))):
        tracker = build_tracker(LoggingConfig(tensorboard=True), "id", tmp_path, {}, resumed_at, pytest.fail)
        with MetricsWriter(tmp_path / "metrics.jsonl") as metrics:
            for step in steps:
                metrics.write([{"step": step, "loss": 8.0 / step}])
                tracker.log({"step": step, "loss": 8.0 / step})
        tracker.finish()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [
        (s, pytest.approx(8.0 / s)) for s in range(1, 10)
    ]
