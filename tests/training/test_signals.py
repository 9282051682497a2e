from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from nvfp4_train.errors import StoppedBySignal
from nvfp4_train.training.signals import StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_the_flag_and_handlers_come_back(number):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        stop.defer()
        assert not stop
        os.kill(os.getpid(), number)
        assert stop
        assert stop.signal == number
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_before_the_first_step_a_signal_stops_at_once():
    def start() -> None:
        with (
            StopRequest(),
            contextlib.suppress(Exception),
        ):  # which is not taken for an error of what was interrupted
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(StoppedBySignal, match="SIGTERM before the first step; nothing had"):
        start()


# A signal the moment that a module is asked for.
_AT_IMPORT = """
import os, signal, sys
class Signals:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.{signal})
sys.meta_path.insert(0, Signals())
from nvfp4_train import cli, pretrain
sys.exit(cli.exit_code(pretrain.main))
"""


@pytest.mark.parametrize(
    ("name", "module"),
    [("SIGTERM", "hydra"), ("SIGINT", "hydra"), ("SIGTERM", "torch"), ("SIGTERM", "torch.fx")],
)
def test_a_signal_while_the_program_is_imported_ends_it_with_75(name, module, tmp_path):
    code = _AT_IMPORT.format(module=module, signal=name)
    words = ["+experiment=quickstart", f"run_dir={tmp_path / 'run'}"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 75, done.stderr
    assert f"stopped by {name} before the first step; nothing had to be saved" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_further_signals_change_nothing_about_a_stop_before_the_first_step():
    code = (
        "import os, signal, sys\nfrom nvfp4_train import cli\nfrom nvfp4_train.training.signals import StopRequest\n"
        "def main(_):\n    with StopRequest():\n        try:\n            os.kill(os.getpid(), signal.SIGTERM)\n"
        "        finally:\n            os.kill(os.getpid(), signal.SIGTERM)\n            print('unwound')\n"
        "code = cli.exit_code(main)\nos.kill(os.getpid(), signal.SIGTERM)\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (75, "unwound\n"), done.stderr


# Work in C that a Python handler has to wait for, with the GIL released.
_DEAF = """
import hashlib, subprocess, sys
from nvfp4_train.training.signals import StopRequest
with StopRequest():
    child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print(child.pid, flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2 * 10**9)
"""


def test_before_the_first_step_even_a_long_call_into_c_is_ended():
    process = subprocess.Popen(
        [sys.executable, "-c", _DEAF], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    child = int(process.stdout.readline())
    # After this line Python does next to nothing: time on the processor means that it is within C, deaf to the handler.
    measured = psutil.Process(process.pid)
    before = measured.cpu_times().user
    while measured.cpu_times().user < before + 0.1:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=240)
    assert process.returncode == 75
    assert "nothing had to be saved: run the same command" in error
    deadline = time.monotonic() + 10
    while runs(child):  # killed, but the kernel takes its time on a busy machine
        assert time.monotonic() < deadline
        time.sleep(0.01)


def runs(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_second_sigint_aborts_at_once_and_a_second_sigterm_does_not():
    # A sleep that restarts after signals stands for a C++ call that Python handlers cannot interrupt.
    code = (
        "import time\nfrom nvfp4_train.training.signals import StopRequest\n"
        "with StopRequest() as stop:\n    stop.defer()\n    print('ready', flush=True)\n    time.sleep(20)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    child.stdout.readline()
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        time.sleep(0.2)
        assert child.poll() is None
        child.send_signal(number)
    assert child.wait(timeout=5) == -signal.SIGINT
