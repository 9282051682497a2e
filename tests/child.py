"""Python code in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


def results_of(code: str, *words: str) -> Any:
    """What `code`, run on `words` by a process with one thread, prints as JSON. Fails with its errors if it does."""
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        timeout=180,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
