from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvfp4_train import units


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0"),
        (999, "999"),
        (999.6, "1.00k"),
        (12_345, "12.3k"),
        (1.2e6, "1.20M"),
        (999_960, "1.00M"),
        (1e13, "10.0T"),
        (0.25, "0.25"),
        (99.96, "100"),
        (-1500, "-1.50k"),
        (math.nan, "nan"),
    ],
)
def test_count(n, text):
    assert units.count(n) == text


@pytest.mark.parametrize(
    ("n", "text"),
    [(512, "512 B"), (1023.9, "1.00 KiB"), (1.25 * 2**30, "1.25 GiB"), (100 * 2**20, "100 MiB")],
)
def test_size(n, text):
    assert units.size(n) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.85, "850 ms"),
        (12.34, "12.3 s"),
        (59.96, "1m 00s"),
        (245, "4m 05s"),
        (3599.6, "1h 00m"),
        (7380, "2h 03m"),
        (273_600, "3d 04h"),
        (math.inf, "?"),
    ],
)
def test_duration(seconds, text):
    assert units.duration(seconds) == text


@given(st.floats(min_value=1, max_value=1e14))
def test_a_count_is_right_to_three_digits_and_short(n):
    text = units.count(n)
    factor = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1], 1.0)
    assert float(text.rstrip("kMBT")) * factor == pytest.approx(n, rel=6e-3)
    assert len(text) <= 6


@given(st.text())
def test_printable_text_cannot_steer_a_terminal(text):
    out = units.printable(text)
    assert not [c for c in out if (ord(c) < 32 or 127 <= ord(c) < 160) and c not in "\n\t"]
    if text.isascii() and text.isprintable():
        assert out == text


def test_table_aligns_names_and_further_lines_of_a_value():
    assert (
        units.table([("a", "1\n2"), ("longer", "3"), ("b", "")])
        == "  a       1\n          2\n  longer  3\n  b"
    )
