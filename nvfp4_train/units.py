"""Numbers as people read them, for everything that is printed."""

from __future__ import annotations

import math
import re

_COUNT_UNITS = ("", "k", "M", "B", "T")
_SIZE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def count(n: float) -> str:
    """Three digits and a unit: 999, 12.3k, 1.20M, 10.0T."""
    if not math.isfinite(n):
        return str(n)
    return _scaled(n, 1000.0, _COUNT_UNITS, "")


def size(n_bytes: float) -> str:
    """Bytes in binary units, three digits: 512 B, 1.25 GiB."""
    return _scaled(n_bytes, 1024.0, _SIZE_UNITS, " ")


def rate(tokens_per_second: float) -> str:
    """12.3k tok/s."""
    return f"{count(tokens_per_second)} tok/s"


def duration(seconds: float) -> str:
    """Two units: 850 ms, 12.3 s, 4m 05s, 2h 03m, 3d 04h."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, sub, length, sub_length in (("d", "h", 86400, 3600), ("h", "m", 3600, 60), ("m", "s", 60, 1)):
        if whole >= length:
            return f"{whole // length}{unit} {whole % length // sub_length:02d}{sub}"
    raise AssertionError


def printable(text: str) -> str:
    """`text` with every control character but newline and tab written as an escape, so that it cannot steer a terminal."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: f"\\x{ord(match[0]):02x}", text)


def table(rows: list[tuple[str, str]], indent: str = "  ") -> str:
    """Two aligned columns, one row a line; further lines of a value stay in its column."""
    width = max((len(name) for name, _ in rows), default=0)
    continued = "\n" + indent + " " * (width + 2)
    lines = (indent + name.ljust(width) + "  " + value.replace("\n", continued) for name, value in rows)
    return "\n".join(line.rstrip() for line in lines)


def _scaled(n: float, base: float, units: tuple[str, ...], space: str) -> str:
    power = 0
    # A number that would round up to the next unit's 1 is written in it: 999.96k is 1.00M.
    while abs(n) >= (999.5 if base == 1000.0 else 1023.5) and power < len(units) - 1:
        n /= base
        power += 1
    if power == 0 and float(n).is_integer():
        return f"{n:.0f}{space}{units[0]}"
    digits = 2 if abs(n) < 9.995 else 1 if abs(n) < 99.95 else 0
    return f"{n:.{digits}f}{space}{units[power]}"
