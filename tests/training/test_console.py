from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import threading

import pytest

from nvfp4_train.errors import ConfigError
from nvfp4_train.training import console as console_module
from nvfp4_train.training.console import Console

TOTAL_STEPS, TOKENS_A_STEP = 293, 4096


class Clock:
    """Replaces time.monotonic; a test says how long things take."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(console_module.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def record(step: int, **more) -> dict:
    values = {
        "loss": 4.5,
        "lr": 2.7e-3,
        "grad_norm": 0.5,
        "clip_threshold": 0.65,
        "tokens_per_second": 11_234.0,
    }
    return {"step": step, "tokens": step * TOKENS_A_STEP} | values | more


def train(console: Console, clock: Clock, steps: range, seconds_a_step: float) -> None:
    for step in steps:
        clock.now += seconds_a_step * steps.step
        console.step(record(step), TOTAL_STEPS, TOTAL_STEPS * TOKENS_A_STEP)


def without_times(log: str) -> list[str]:
    return [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ?", "", line) for line in log.splitlines()]


def test_a_line_says_all_that_matters_with_units(tmp_path, clock):
    out = io.StringIO()
    with Console(tmp_path / "console.log", stream=out) as console:
        train(console, clock, range(10, 11), 1.0)
    line = out.getvalue()
    rest = (TOTAL_STEPS - 10) * TOKENS_A_STEP / 11_234
    for part in (
        "3%",
        "10/293",
        "loss 4.5000",
        "lr 2.70e-03",
        "grad 0.500 (clip 0.65)",
        "11.2k tok/s",
        "eta 1m 44s",
    ):
        assert part in line
    assert 103 < rest < 104
    assert line.strip() in (tmp_path / "console.log").read_text()


def test_eta_follows_the_pace_of_this_launch_with_its_validations(tmp_path, clock):
    out = io.StringIO()
    console = Console(None, stream=out)
    clock.now += 100.0  # a long compilation before the first step is no part of the pace
    train(console, clock, range(100, 193, 10), 3.0)
    clock.now += 210.0  # ten steps among these cost 21 s more each
    train(console, clock, range(193, 194), 3.0)
    elapsed = 3.0 * 90 + 210.0 + 3.0
    assert f"eta {console_module.units.duration(100 * elapsed / 93 + 0.5)}" in out.getvalue().splitlines()[-1]


def test_a_default_run_in_a_log_file_stays_within_forty_lines(tmp_path, clock):
    out = io.StringIO()
    with Console(None, stream=out) as console:
        train(console, clock, range(10, 291, 10), 1.3)
        train(console, clock, range(TOTAL_STEPS, TOTAL_STEPS + 1), 1.3)
    lines = out.getvalue().splitlines()
    assert 10 <= len(lines) <= 30
    assert lines[0].lstrip().startswith("3%")
    assert lines[-1].startswith("100%")
    assert "eta" not in lines[-1]


def test_lines_grow_rare_in_a_long_run(clock):
    out = io.StringIO()
    console = Console(None, stream=out)
    for step in range(1, 86_400):
        clock.now += 1.0
        console.step(record(step), 10**6, 10**9)
    assert len(out.getvalue().splitlines()) < 86_400 / 60 + 40


def test_non_finite_values_are_shown(clock):
    out = io.StringIO()
    Console(None, stream=out).step(record(10, loss=float("nan"), grad_norm=float("inf")), 20, 1e5)
    assert "loss nan" in out.getvalue()
    assert "grad inf" in out.getvalue()


def test_log_survives_restarts_and_a_torn_line_without_control_characters(tmp_path, clock):
    path = tmp_path / "run" / "console.log"
    with Console(path, "bar", io.StringIO()) as console:
        console.info("first\x1b[2J \r\x07")
    with open(path, "a") as f:
        f.write("torn by a ki")
    with Console(path, "bar", io.StringIO()) as console:
        console.header("Title", [("model", "tiny")])
        train(console, clock, range(10, 100, 10), 20.0)
        console.warning("careful")
    log = path.read_text()
    assert not [c for c in log if ord(c) < 32 and c != "\n"]
    lines = without_times(log)
    assert lines[0] == r"first\x1b[2J \x0d\x07"
    assert lines[1] == "torn by a ki"
    assert "new launch" in lines[2]
    assert lines[3:5] == ["Title", "  model  tiny"]
    assert sum("loss" in line for line in lines) == 9
    assert lines[-1] == "WARNING  careful"


def run_in_terminal(code: str, columns: int = 80, **env) -> str:
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=child,
        env={**os.environ, "COLUMNS": str(columns), "TERM": "xterm", "PYTHONIOENCODING": "utf-8", **env},
    )
    os.close(child)
    data = b""
    while True:
        try:
            data += (part := os.read(parent, 4096))
        except OSError:
            break
        if not part:
            break
    os.close(parent)
    assert process.wait() == 0
    return data.decode()


def screen(output: str) -> list[str]:
    """What a terminal shows in the end: carriage returns overwrite."""
    lines = []
    for line in re.sub(r"\x1b\[[\d;]*m", "", output).replace("\r\n", "\n").split("\n"):
        cells: list[str] = []
        for part in line.split("\r"):
            cells[: len(part)] = part
        lines.append("".join(cells).rstrip())
    return lines


SESSION = """
from nvfp4_train.training import console as c
c._REDRAW_SECONDS = 0
console = c.Console(None)
for step in range(10, 101, 10):
    console.step({"step": step, "tokens": step, "loss": 4.5, "lr": 1e-3, "grad_norm": .5, "clip_threshold": .65,
                  "tokens_per_second": 5e3}, 100, 100)
    if step == 50: console.warning("look here")
console.info("the end")
console.close()
"""


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_a_terminal_shows_one_line_that_updates_and_fits(columns):
    output = run_in_terminal(SESSION, columns)
    lines = screen(output)
    assert "\x1b[33;1mWARNING  look here\x1b[0m" in output
    assert lines[0] == "WARNING  look here"
    assert "100/100" in lines[1]
    assert "loss 4.5000" in lines[1] or columns == 40
    assert ("lr 1.00e-03" in lines[1]) == (columns == 120)
    assert len(lines[1]) < columns
    assert lines[2:] == ["the end", ""]


def test_colours_and_characters_follow_the_terminal():
    output = run_in_terminal(SESSION, NO_COLOR="1", PYTHONIOENCODING="ascii")
    assert "\x1b" not in output
    assert output.isascii()
    assert "####" in output


def test_a_closed_pipe_stops_nothing(tmp_path):
    code = (
        "from nvfp4_train.training.console import Console\n"
        f"console = Console({str(tmp_path / 'console.log')!r})\n"
        "for i in range(20000): console.info(f'line {i}')\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait() == 0
    assert (tmp_path / "console.log").read_text().endswith("line 19999\n")


def test_a_full_disk_stops_nothing():
    out = io.StringIO()
    console = Console("/dev/full", stream=out)
    console.info("one")
    console.info("two")
    assert "no longer written (No space left on device)" in out.getvalue()
    assert [line for line in out.getvalue().splitlines() if "WARNING" not in line] == ["one", "two"]


def test_threads_do_not_mix_their_lines():
    out = io.StringIO()
    console = Console(None, stream=out)
    threads = [
        threading.Thread(target=lambda: [console.info("x" * 50) for _ in range(200)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(out.getvalue().splitlines()) == {"x" * 50}


def test_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match=r"logging.console='fancy'.*auto, bar, lines"):
        Console(None, "fancy")
