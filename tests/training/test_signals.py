from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from nvfp4_train.errors import StoppedBySignal
from nvfp4_train.training.signals import StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_the_flag_and_handlers_come_back(number):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        stop.check("while nothing came")
        assert not stop
        os.kill(os.getpid(), number)
        assert stop
        assert stop.signal == number
        with pytest.raises(StoppedBySignal, match=f"{signal.Signals(number).name} while preparing data"):
            stop.check("while preparing data")
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_second_sigint_aborts_at_once_and_a_second_sigterm_does_not():
    # A sleep that restarts after signals stands for a C++ call that Python handlers cannot interrupt.
    code = (
        "import time\nfrom nvfp4_train.training.signals import StopRequest\n"
        "with StopRequest():\n    print('ready', flush=True)\n    time.sleep(20)\n"
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
