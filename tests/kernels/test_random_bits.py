import re
from pathlib import Path

import pytest
import torch
from nvfp4_kernels import CounterKey, philox4x32
from nvfp4_kernels.random_bits import block_bytes

# Published known answers (Random123 1.09, kat_vectors, philox4x32 10 rounds).
KNOWN = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_known_answers(counter, key, expected):
    out = philox4x32([torch.tensor(c) for c in counter], [torch.tensor(k) for k in key])
    assert [int(v) for v in out] == expected


def test_the_known_answers_in_the_documentation():
    text = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text()
    vectors = re.findall(r"^\| `([0-9a-f ]{35})` \| `([0-9a-f ]{17})` \| `([0-9a-f ]{35})` \|$", text, re.M)
    assert [tuple([int(word, 16) for word in cell.split()] for cell in row) for row in vectors] == KNOWN
    blocks = re.findall(r"^\| " + r"(\d+) \| " * 7 + r"`([0-9a-f]{32})` \|$", text, re.M)
    assert len(blocks) == 5
    for *fields, expected in blocks:
        seed, step, microbatch, tensor, role, row, column = map(int, fields)
        key = CounterKey(seed, step, microbatch, tensor, role, row_offset=row, col_offset=16 * column)
        assert bytes(block_bytes(key, 1, 16)[0].tolist()).hex() == expected


def test_element_i_takes_byte_i_of_its_blocks_own_call():
    key = CounterKey(seed=7, step=3, microbatch=2, tensor=5, role=1, row_offset=100, col_offset=32)
    got = block_bytes(key, rows=4, cols=48)
    words = philox4x32(
        [torch.tensor(c) for c in (2 + 1, 100 + 2, 3, 2)], [torch.tensor(7), torch.tensor(5 * 4 + 1)]
    )
    expected = [b for w in words for b in int(w).to_bytes(4, "little")]
    assert got[2, 16:32].tolist() == expected


def test_a_shard_draws_the_bits_of_its_place():
    whole = block_bytes(CounterKey(1, 2, 3, 4), 64, 64)
    shard = block_bytes(CounterKey(1, 2, 3, 4, row_offset=32, col_offset=16), 16, 32)
    assert torch.equal(shard, whole[32:48, 16:48])


def test_the_step_may_be_a_tensor():
    a = block_bytes(CounterKey(1, torch.tensor(9), 3, 4), 16, 16)
    assert torch.equal(a, block_bytes(CounterKey(1, 9, 3, 4), 16, 16))
    assert not torch.equal(a, block_bytes(CounterKey(1, 10, 3, 4), 16, 16))


def test_every_field_changes_the_bits():
    base = {"seed": 1, "step": 2, "microbatch": 3, "tensor": 4, "role": 0}
    first = block_bytes(CounterKey(**base), 16, 16)
    for field in base:
        assert not torch.equal(first, block_bytes(CounterKey(**{**base, field: base[field] + 1}), 16, 16)), (
            field
        )


def test_col_offset_must_keep_blocks_whole():
    with pytest.raises(ValueError, match="multiple of 16, not 8"):
        CounterKey(1, 2, 3, 4, col_offset=8)
