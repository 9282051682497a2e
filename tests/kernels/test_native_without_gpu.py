"""What can be known of the native kernels without a Blackwell GPU: the machine code they become, what it takes of the chip,
and in Triton's interpreter that every index is right (scale layout, ragged sizes, epilogue) and every code the reference's.

Child processes: Triton decides at import whether it interprets, and a failing compilation may abort.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (pip install triton)"
)
ROOT = Path(__file__).parents[2]
COMPILE = ROOT / "kernels/benchmarks/compile_native.py"
# Triton 3.6 and 3.7 write the size of a scaled block as scale_vec::4X (four scales for 64 elements), 3.8 as block16.
SCALED_BLOCK = r"(scale_vec::4X|block16)"
FP4 = rf"kind::mxf4nvf4\.block_scale\.{SCALED_BLOCK}"
GEMM = {
    100: rf"tcgen05\.mma\.cta_group::1\.{FP4}",
    103: rf"tcgen05\.mma\.cta_group::1\.{FP4}",
    120: rf"mma\.sync\.aligned\.m16n8k64\.row\.col\.{FP4}\.f32\.e2m1\.e2m1\.f32\.ue4m3",
}
LIMITS = {100: (232448, 512), 103: (232448, 512), 120: (101376, 0)}  # shared bytes, tensor memory columns


def run(arguments, folder, **environment):
    environment |= {
        "TRITON_CACHE_DIR": str(folder),
        "PYTHONPATH": str(ROOT / "kernels"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def compiled(chip, kind, folder):
    rows = json.loads(run([COMPILE, chip, "--json", "--only", kind], folder))
    assert rows
    for row in rows:
        shared, tensor = LIMITS[chip]
        # One value at most: none with Triton 3.7.1, one in some kernels with 3.6.0 and 3.9.0.
        assert row["spilled"] <= 8, row
        assert row["registers"] <= 255, row
        assert row["shared"] <= shared, row
        assert row["tensor"] <= tensor, row
    return rows


@pytest.mark.parametrize("chip", GEMM)
def test_the_gemm_compiles_to_fp4_products_with_a_scale_for_16_elements(chip, tmp_path):
    for row in compiled(chip, "gemm", tmp_path):
        assert row["instructions"], row
        assert all(re.fullmatch(GEMM[chip], found) for found in row["instructions"]), row
        assert row["tma"] >= 5, row  # four operands and the result


@pytest.mark.parametrize("chip", GEMM)
def test_the_quantize_kernels_contain_the_conversions_meant(chip, tmp_path):
    found = {row["kernel"]: row["instructions"] for row in compiled(chip, "quantize", tmp_path)}
    nearest = ["cvt.rn.satfinite.e2m1x2.f32"]
    expected = {"rows + columns nearest": nearest, "16x16 weights, both ways": nearest}
    expected["rows + columns stochastic"] = []  # software, with the counter's bits
    if chip != 120:
        expected["rows + columns hardware"] = ["cvt.rs.satfinite.e2m1x4.f32"]  # sm_120 has none
    assert found == expected


GEMM_BITS = """
import sys
import torch
from nvfp4_kernels.format import E2M1_VALUES, QuantizedTensor
from nvfp4_kernels.native.matmul_triton import Tile, launch
from nvfp4_kernels.native.tensor import NativeTensor

# Scales of 1/2, 1 and 2 keep every sum exact in fp32 whatever its order: results are compared by bits.
def drawn(rows, cols):
    codes = torch.randint(0, 256, (rows, cols // 2), dtype=torch.uint8)
    scales = (2.0 ** torch.randint(-1, 2, (rows, cols // 16)).float()).to(torch.float8_e4m3fn)
    return QuantizedTensor(codes, scales, torch.tensor(2688.0), (1, 16))

def check(m, n, k, tile, dtype, accumulate, programs):
    a, b, alpha = drawn(m, k), drawn(n, k), torch.tensor(0.25)
    there = torch.randint(-8, 8, (m, n)).to(dtype)
    expected = a.operand(torch.float64) @ b.operand(torch.float64).t() * 0.25 + (there.double() if accumulate else 0)
    out = there.clone()
    launch(NativeTensor.of(a), NativeTensor.of(b), alpha, out, tile, accumulate, programs, emulate=True)
    # The interpreter cuts fp32 to bf16 where hardware rounds.
    expected = expected.float().view(torch.int32) & (-1 if dtype == torch.float32 else -65536)
    assert torch.equal(out.float(), expected.view(torch.float32)), (m, n, k)

torch.manual_seed(0)
check(144, 272, 336, Tile(128, 128, 128, 3, 4), torch.float32, False, 2)   # nothing a multiple of its tile
check(272, 144, 80, Tile(128, 256, 256, 3, 4), torch.bfloat16, False, 1)   # the result leaves in two parts
check(272, 400, 208, Tile(256, 128, 128, 3, 4), torch.float32, True, 3)    # four parts, added to what is there
check(16, 16, 16, Tile(128, 128, 256, 3, 4), torch.bfloat16, True, 7)
check(1296, 144, 64, Tile(128, 128, 128, 3, 4), torch.float32, False, 4)   # more row tiles than a band holds
"""
QUANTIZE_BITS = """
import sys
import torch
from nvfp4_kernels import SIGNS, CounterKey, amax, quantize, quantize_rows_and_columns
from nvfp4_kernels.native import quantize as native
from nvfp4_kernels.native.tensor import NativeTensor, transposed_square

def same(got, expected):
    assert torch.equal(got.codes, expected.codes), (got.codes != expected.codes).sum()
    assert torch.equal(got.scales.view(torch.uint8), NativeTensor.of(expected).scales.view(torch.uint8))

def check(x, signs, stochastic):
    rows_key = CounterKey(5, torch.tensor(7), 1, 9, row_offset=48) if stochastic else None
    columns_key = CounterKey(2**32 - 1, 2**32 - 2, 1, 9, role=1, col_offset=32) if stochastic else None
    both = amax(x, signs, backend="reference")
    requests = (both[0], rows_key), (both[1 if signs else 0], columns_key)
    expected = quantize_rows_and_columns(x, *((*r, "codes") for r in requests), signs, backend="reference")
    for got, wanted in zip(native.quantize_rows_and_columns(x, *requests, signs, backend='triton'), expected):
        same(got, wanted)

def check_square(x):
    q = quantize(x, (16, 16), backend="reference")
    for got, wanted in zip(native.quantize_square(x, q.amax, 'triton'), (q, transposed_square(q))):
        same(got, wanted)

torch.manual_seed(0)
x = torch.randn(48, 80) * torch.exp(2 * torch.randn(48, 1))  # one tile down, two across, both ragged
x[:, :16], x[3, 20:40], x[8:16, 60:70] = 0, -0.0, x[8:16, 60:70] * 1e-6
x[5, 64:80] = torch.tensor([6, 0.25, -0.75, 1.25, 1.75, 2.5, -3.5, 5, -0.25, 0.75, 1.25, 1.75, -2.5, 3.5, 5, 0.1])
"""
CASES = {
    "gemm": GEMM_BITS,
    "forward": QUANTIZE_BITS + "check(x.bfloat16(), SIGNS, False)",
    "backward": QUANTIZE_BITS + "check(x.t().contiguous().bfloat16(), SIGNS, True)",
    "weights": QUANTIZE_BITS + "check_square(x)",
}


@pytest.mark.parametrize("case", CASES)
def test_the_interpreter_gives_the_exact_bits(case, tmp_path):
    run(["-c", CASES[case]], tmp_path, TRITON_INTERPRET="1")
