"""Shows on a Blackwell GPU what no other machine can: that native NVFP4 computes what the emulation computes, and how fast.

    python scripts/validate_blackwell.py [--out blackwell.md] [--steps 200] [--quick] [key=value ...]

Bits of every quantize kernel against the reference, every GEMM backend against exact and emulated products, Transformer
Engine against ours, speeds beside their peaks, and a training of 125m_hybrid (further words go to it: data.source=DIR)
by every backend. What needs no such chip it does on any machine, in child processes: the kernels in Triton's
interpreter, the layouts, Transformer Engine's Python reference, machine code. It says what it skipped and why, writes a
report in Markdown, and exits with 1 when a check fails. About ten minutes on one B200; --quick leaves out the training
and those child processes. The checks are in scripts/blackwell/.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from blackwell import anywhere, bits, products, report, speeds, training, transformer_engine


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("blackwell.md"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="no training, no child processes")
    parser.add_argument("words", nargs="*", help="key=value words for the training")
    args = parser.parse_args()
    parts = (anywhere, bits, products, transformer_engine, speeds, training)
    failed = report.run([check for part in parts for check in part.CHECKS], args)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
