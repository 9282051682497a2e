"""What can be known of the Triton kernels without a GPU: their bits in Triton's interpreter, and that they compile.

Child processes: Triton decides at import whether it interprets, and a failing compilation may abort.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (pip install triton)"
)

INTERPRET = """
import random
import torch
from nvfp4_kernels import SIGNS, CounterKey, quantize_rows_and_columns, amax, quantize, producers
from nvfp4_kernels import FP8, MXFP4, quantize_blocks
from nvfp4_kernels.native import fp8
from nvfp4_kernels.triton import blockscaled, ops

def same(got, expected, name):
    assert got.shape == expected.shape, name
    got, expected = (t.contiguous().view(torch.uint8) for t in (got, expected))
    assert torch.equal(got, expected), f"{name}: {(got != expected).sum()} bytes differ"

def check(x, signs, stochastic, output):
    rows_key = CounterKey(5, torch.tensor(7), 1, 9, row_offset=48) if stochastic else None
    columns_key = CounterKey(2**32 - 1, 2**32 - 2, 1, 9, role=1, col_offset=32) if stochastic else None
    both = amax(x, signs, backend="reference")
    same(ops.amax_pair(x, signs), both, "amax")
    requests = (both[0], rows_key, output), (both[1 if signs else 0], columns_key, output)
    expected = quantize_rows_and_columns(x, *requests, signs, backend="reference")
    got = ops.quantize(x, *requests, signs)
    expand = ops.expand_rows, ops.expand_columns
    for i, (g, e) in enumerate(zip(got, expected)):
        turn = (lambda t: t.t()) if i else (lambda t: t)
        if output == "operand":
            same(turn(g[0]), e.cached_operand, f"operand {i}")
            continue
        same(turn(g[0]), e.codes, f"codes {i}")
        same(turn(g[1]), e.scales.view(torch.uint8), f"scales {i}")
        same(turn(expand[i](*g)), e.operand(), f"expanded {i}")

def check_square(x, output):
    e = quantize(x, (16, 16), output=output, backend="reference")
    g = ops.quantize_square(x, e.amax, output)
    if output == "operand":
        return same(g[0], e.cached_operand, "square operand")
    same(g[0], e.codes, "square codes")
    same(g[1], e.scales.view(torch.uint8), "square scales")

def check_blocks():
    x = torch.randn(32, 80) * torch.exp(3 * torch.randn(32, 1))
    key = CounterKey(5, 7, 2**32 - 1, 9, role=1, row_offset=32, col_offset=48)
    for fmt, block, draw, rotate, output in (
        (MXFP4, (1, 32), key, False, "codes"), (MXFP4, (32, 1), key, True, "codes"),
        (MXFP4, (32, 32), None, False, "operand"),
        (FP8, (1, 128), None, False, "operand_fp32"), (FP8, (128, 1), None, False, "codes"),
        (FP8, (128, 128), None, False, "operand"),
    ):
        turned, square = block[1] == 1, block[0] == block[1]
        options = {"square": square, "key": draw, "transpose": turned, "rotate": rotate, "output": output}
        e = quantize_blocks(x.bfloat16(), fmt, backend="reference", **options)
        g = blockscaled.quantize_blocks(x.bfloat16(), fmt, block, draw, rotate, output)
        turn = (lambda t: t.t()) if turned else (lambda t: t)
        if output != "codes":
            same(turn(g[0]), e.cached_operand, f"{fmt.name} {block}")
            continue
        same(turn(g[0]), e.codes.view(torch.uint8), f"{fmt.name} {block} codes")
        same(turn(g[1]), e.scales, f"{fmt.name} {block} scales")
        if turned:
            same(turn(blockscaled.expand_blocks(*g, fmt)), e.operand(), f"{fmt.name} {block} expanded")

def check_native_fp8():
    x = torch.randn(144, 208) * torch.exp(3 * torch.randn(144, 1))
    x[:3], x[5, :7] = 0, -0.0
    results = [
        (*fp8.quantize_rows_and_columns(x, True, True, backend), *fp8.quantize_square(x, backend))
        for backend in ("triton", "portable")
    ]
    for i, (g, e) in enumerate(zip(*results)):
        same(g.codes, e.codes, f"native FP8 codes {i}")
        same(g.scales.t(), e.scales.t(), f"native FP8 scales {i}")

def check_producers():
    for rows, cols, groups, signs in ((16, 528, 1, SIGNS), (20, 64, 4, None)):
        x, z, w = torch.randn(rows, cols), torch.randn(rows, cols).bfloat16(), torch.rand(cols)
        for value, gate in ((x.bfloat16(), None), (x, z)):
            y, scale, both = ops.rms_norm(value, gate, w, 1e-5, groups, signs, True)
            expected = producers.rms_norm(value, gate, w, 1e-5, groups, signs)
            torch.testing.assert_close(y, expected[0], rtol=2**-7, atol=0)
            torch.testing.assert_close(scale, expected[1])
            same(both, amax(y, signs, backend="reference"), "norm's amax")
        value = x.bfloat16()
        for got, expected in zip(ops.squared_relu(value, signs), producers.squared_relu(value, signs)):
            same(got, expected, "squared ReLU")

def check_norm(rows, group, groups, dtype, gated):
    # Against fp64. Errors: a unit of the result's dtype, as the interpreter cuts off where it stores bf16, and of fp32 sums.
    from nvfp4_train.precision.producers import rms_norm

    cols = group * groups
    x, w, dy = torch.randn(rows, cols).to(dtype), torch.rand(cols), torch.randn(rows, cols).bfloat16()
    gate = torch.randn(rows, cols + 12).bfloat16()[:, 4 : 4 + cols] if gated else None
    y, rstd, none = ops.rms_norm(x, gate, w, 1e-5, groups, None, False)
    assert none.numel() == 0
    if gated and dtype == torch.float32:
        gate = gate.float()  # and its gradient is not cut off
    dx, dgate, dw = ops.rms_norm_backward(dy, x, gate, rstd, w)
    leaves = [t.double().requires_grad_() for t in (x, w, gate) if t is not None]
    exact = rms_norm(*leaves[:2], 1e-5, gate=leaves[2] if gated else None, groups=groups)
    wanted = exact, *torch.autograd.grad(exact, leaves, dy.double())
    for got, want in zip((y, dx, dw, dgate), wanted):
        step = 2**-7 if got.dtype == torch.bfloat16 else 0
        atol = 100 * 2**-24 * want.abs().max().item()
        torch.testing.assert_close(got.double(), want, rtol=step, atol=atol)

def check_norms():
    draw = random.Random(0)
    ops.NORM_CHUNK = 8
    for dtype, gated in ((torch.float32, True), (torch.float32, False), (torch.bfloat16, True), (torch.bfloat16, False)):
        groups = draw.randint(1, 8)
        check_norm(draw.randint(1, 20), 4 * draw.randint(1, 400 // groups // 4), groups, dtype, gated)
    check_norm(3, 1040, 1, torch.bfloat16, True)  # read twice
    x, z, dy = torch.randn(16, 32), torch.randn(16, 32).bfloat16(), torch.randn(16, 32).bfloat16()
    x[2, 5], x[3, 9], z[4, 17], z[5, 30] = torch.nan, -torch.inf, torch.nan, torch.inf
    y, rstd, both = ops.rms_norm(x, z, torch.ones(32), 1e-5, 2, SIGNS, True)
    plain, plain_rstd, _ = producers.rms_norm(x, z, torch.ones(32), 1e-5, 2, SIGNS)
    results = y, *ops.rms_norm_backward(dy, x, z, rstd, torch.ones(32))
    for got, e in zip(results, (plain, *producers.rms_norm_backward(dy, x, z, plain_rstd, torch.ones(32)))):
        assert torch.equal(got.isfinite(), e.isfinite()) and not e.isfinite().all()
    assert not both.isfinite().any()

def check_conv():
    # In fp32: the interpreter cuts off what a store to bf16 rounds. Chunks and blocks end within parts; x is strided.
    from nvfp4_kernels.triton import conv
    from nvfp4_train.model.conv import conv_silu

    conv.WIDTH, conv.WARPS, conv.FORWARD, conv.BACKWARD = 16, 1, {"CHUNK": 8, "ROWS": 4}, {"CHUNK": 8, "ROWS": 4}
    sizes, length = (20, 5, 7), 13
    ids = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3], [4] * 7 + [5] * 6])
    for k, seq_idx in ((4, ids), (1, None)):
        x = torch.randn(2, length, 48)[..., 8:40]
        weight, bias, dy = torch.randn(32, 1, k), torch.randn(32), torch.randn(2, length, 32)
        leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
        y = torch.cat(conv_silu(*leaves, seq_idx, sizes), -1)
        got = conv.forward(x, weight, bias, seq_idx, sizes)
        wide = torch.full((2, length, 40), torch.nan)
        grads = conv.backward(dy.split(sizes, -1), x, weight, bias, seq_idx, wide[..., 3:35])
        assert wide[..., :3].isnan().all() and wide[..., 35:].isnan().all()
        wanted = torch.autograd.grad(y, leaves, dy.double())
        # Each sum has at most 26 addends of size below 10, and sigmoid errs by a few ulp: 30 x 10 x 2^-24.
        for result, want in zip((torch.cat(got, -1), *grads), (y, *wanted)):
            torch.testing.assert_close(result.double(), want, rtol=0, atol=2e-5)

def check_cross_entropy():
    from nvfp4_kernels.triton import cross_entropy
    from tests.kernels.test_cross_entropy import check, check_non_finite

    cross_entropy.WARPS = 1
    for rows, vocabulary, dtype in ((3, 1, torch.float32), (2, 128, torch.float32), (2, 512, torch.bfloat16)):
        check(rows, vocabulary, dtype, "cpu")
    for _ in range(6):
        dtype = torch.float32 if torch.rand(()) < 0.5 else torch.bfloat16
        check(*(int(torch.randint(1, n, ())) for n in (7, 700)), dtype, "cpu")
    check_non_finite(300, "cpu")

def check_scan():
    from tests.kernels import test_scan_bc, test_scan_inside

    for ids in (None, test_scan_inside.DOCUMENTS):
        for test in (test_scan_inside, test_scan_bc):
            test.check(ids, torch.float32, "cpu")
    for test in (test_scan_inside, test_scan_bc):  # nothing past the end
        test.check(None, torch.float32, "cpu", heads=2, groups=1, head_dim=80, length=64, chunk=64)

def check_scan_output():
    from tests.kernels.test_scan_output import DOCUMENTS, check, check_decay

    for tiles in (64, 4, 2), (128, 8, 3):
        check(None, torch.float32, "cpu", [tiles])
        check(DOCUMENTS, torch.float32, "cpu", [tiles], head_dim=16)
    check_decay(200, 20, 128, "cpu")
    check_decay(64, 3, 64, "cpu")

def check_scan_states():
    from nvfp4_kernels.triton import scan_states
    from tests.kernels.test_scan_states import DOCUMENTS, check

    check(None, torch.float32, "cpu")
    for tile in (scan_states.FORWARD, scan_states.BACKWARD):  # two heads and a slice of their states a program
        tile |= {"heads": 2, "columns": 16}
    check(DOCUMENTS, torch.float32, "cpu")

def check_whole_scan():
    from tests.kernels.test_scan import check

    check(False, 128)
    check(True, 64, head_dim=32, state=24)

x = torch.randn(16, 272) * torch.exp(2 * torch.randn(16, 1))
x[:, :16], x[3, 20:40], x[8:16, 100:200] = 0, -0.0, x[8:16, 100:200] * 1e-6
x[5, 64:80] = torch.tensor([6, 0.25, -0.75, 1.25, 1.75, 2.5, -3.5, 5, -0.25, 0.75, 1.25, 1.75, -2.5, 3.5, 5, 0.1])
"""
CASES = {
    "forward": "check(x.bfloat16(), SIGNS, False, 'codes')",
    "backward": "check(x.bfloat16(), SIGNS, True, 'operand')",
    "fp32": "check(x, None, True, 'codes')",
    "whole tiles": "check(torch.randn(32, 256).bfloat16(), SIGNS, True, 'operand')",
    "producers": "check_producers()",
    "norms": "check_norms()",
    "blocks": "check_blocks(), check_native_fp8()",
    "convolution": "check_conv()",
    "cross entropy": "check_cross_entropy()",
    "scan": "check_scan()",
    "scan's output": "check_scan_output()",
    "states of the scan": "check_scan_states()",
    "whole scan": "check_whole_scan()",
    "square": "check_square(x.bfloat16(), 'operand'), check_square(x, 'codes')",
}


def run_child(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("case", CASES)
def test_the_interpreter_gives_the_references_bits(case):
    run_child(INTERPRET + CASES[case], TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


COMPILE = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from nvfp4_kernels.native import fp8_kernels
from nvfp4_kernels.triton import blockscaled_kernels, conv, conv_kernels, cross_entropy, kernels, producers
from nvfp4_kernels.triton.cross_entropy_kernels import cross_entropy_kernel
from nvfp4_kernels.triton import scan_decay, scan_decay_kernels, scan_output, scan_output_kernels
from nvfp4_kernels.triton import scan_bc, scan_bc_kernels, scan_inside, scan_inside_kernels
from nvfp4_kernels.triton import scan_states_kernels

def build(kernel, num_warps=2, **types):
    constants = {(kernel.arg_names.index(k),): v for k, v in types.items() if not isinstance(v, Type)}
    signature = {k: types[k].name if isinstance(types[k], Type) else "constexpr" for k in kernel.arg_names}
    compiled = compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants),
        target=GPUTarget("cuda", int(sys.argv[1]), 32), options={"num_warps": num_warps, "enable_fp_fusion": False},
    )
    assert compiled.asm["cubin"]
    return compiled.asm["ptx"]

class Type:
    def __init__(self, name):
        self.name = name

i32, f32, u8s, words, halves, floats, bf16s = map(Type, ("i32", "fp32", "*u8", "*i64", "*i32", "*fp32", "*bf16"))
key = Type(("*i64",) * 4 + ("i32",) * 3)
size = {"rows": i32, "cols": i32}
whole = {"BF16": True, "SIGNS": 0xD7E8, "LANES": 64}
# Every device function in one variant or another: both roundings, both outputs, with the transform.
build(
    kernels.quantize_kernel, x=words, rows=i32, cols=4096, row_amax=floats, row_key=key, row_out=words, row_scales=None,
    column_amax=floats, column_key=None, column_out=halves, column_scales=halves,
    ROW="operand", ROW_STOCHASTIC=True, COLUMN="codes", COLUMN_STOCHASTIC=False, **whole,
)
if sys.argv[1] == "90":
    fp8 = {"row_codes": halves, "row_scales": floats, "column_codes": words, "column_scales": floats}
    for square in (False, True):
        ptx = build(
            fp8_kernels.quantize_kernel, 8, x=bf16s, rows=i32, col_blocks=i32, **fp8, SQUARE=square, HARDWARE=True
        )
        assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    warps = cross_entropy.WARPS
    row = {"targets": Type("*i64"), "keep": Type("*i1"), "losses": floats, "V": i32, "LANES": 32 * warps}
    for gradient in (False, True):
        build(cross_entropy_kernel, warps, logits=bf16s, **row, GRADIENT=gradient, WIDTH=8)
    build(cross_entropy_kernel, warps, logits=floats, **row, GRADIENT=True, WIDTH=4)
if sys.argv[2] == "first":
    sys.exit()
build(
    kernels.quantize_kernel, x=words, rows=i32, cols=272, row_amax=floats, row_key=key, row_out=words, row_scales=u8s,
    column_amax=floats, column_key=key, column_out=words, column_scales=None,
    ROW="codes", ROW_STOCHASTIC=True, COLUMN="operand", COLUMN_STOCHASTIC=True, **whole,
)
build(kernels.amax_kernel, x=words, out=halves, **size, **whole)
build(
    kernels.quantize_square_kernel, x=words, **size, amax=floats, out=words, scales=None, BF16=True, OUTPUT="operand",
    LANES=64,
)
build(kernels.expand_columns_kernel, codes=halves, scales=halves, out=words, **size, LANES=64)
build(kernels.expand_rows_kernel, codes=words, scales=u8s, out=words, blocks=i32, LANES=64)
build(kernels.scale_product_kernel, a=floats, b=floats, out=floats)
norm = {"x": words, "weight": floats, "y": words, "rstd": floats, "amax": halves, "rows": i32, "eps": f32}
for case in (
    {"gate": words, "COLS": 4096, "GATE_STRIDE": 2576, "GROUP": 512, "BF16": True, "SIGNS": 0xD7E8, "LANES": 128},
    {"gate": None, "COLS": 2048, "GATE_STRIDE": None, "GROUP": 2048, "BF16": False, "SIGNS": None, "LANES": 256},
):
    build(producers.norm_kernel, case["LANES"] // 32, **norm, **case, MEASURED=True, WHOLE=False)
gated = {"gate": bf16s, "dgate": bf16s, "gate_stride": i32}
ptx = build(
    producers.norm_backward_kernel, 1, dy=bf16s, x=bf16s, **gated, rstd=floats, weight=floats, dx=bf16s, sums=floats, **size,
    GATED=True, GROUP=320, CHUNK=64, WIDTH=512,
)
assert "cvt.rn.bf16" in ptx
build(producers.squared_relu_kernel, x=words, y=words, amax=halves, **size, SIGNS=0xD7E8, LANES=64)
tile = {"BLOCK_COLS": 1, "WIDTH": 32, "CODES": True}
common = {"x": bf16s, **size, "sign_bits": i32, "out": u8s, "scales": u8s, **tile}
build(
    blockscaled_kernels.quantize_kernel, **common, key=key, BLOCK_ROWS=32, HEIGHT=32, E4M3=False, STOCHASTIC=True,
    ROTATE=True,
)
build(
    blockscaled_kernels.quantize_kernel, **common, key=None, BLOCK_ROWS=128, HEIGHT=128, E4M3=True, STOCHASTIC=False,
    ROTATE=False,
)
build(blockscaled_kernels.expand_kernel, codes=u8s, scales=u8s, out=bf16s, **size, E4M3=True, BLOCK=128, WIDTH=64)
pointers = dict.fromkeys(("x", "dx", "out_a", "out_b", "out_c", "grad_a", "grad_b", "grad_c"), bf16s)
pointers |= {"weight": floats, "bias": floats, "seq_idx": halves, "sums": floats, "batch_stride": i32, "row_stride": i32}
pointers |= {"dx_batch": i32, "dx_row": i32}
parts = {"A": 4096, "B": 1024, "C": 1024, "K": 4, "MASKED": True, "WIDTH": conv.WIDTH}
for kernel, chunk in ((conv_kernels.conv_kernel, conv.FORWARD), (conv_kernels.conv_backward_kernel, conv.BACKWARD)):
    types = {"length": i32, **pointers, **parts, **chunk}
    ptx = build(kernel, **{name: types[name] for name in kernel.arg_names})
    assert "cvt.rn.bf16" in ptx
types = dict.fromkeys(scan_inside_kernels.scan_inside_kernel.arg_names, i32)
types |= dict.fromkeys(("x", "dy", "b", "c", "dstates", "dx", "dscores"), bf16s) | {"seq_idx": halves}
types |= dict.fromkeys(("dt", "decay", "d", "ddt", "ddecay", "dd"), floats)
types |= {"X_ROW": 6144, "DY_ROW": 4096, "B_ROW": 6144, "C_ROW": 6144, "DX_ROW": 4096, "CHUNK": 128}
types |= {"BLOCK": scan_inside.BLOCK, "TILE": scan_inside.TILE, "STRIPS": scan_inside.WARPS, "HEADS": 8, "GROUPS": 8}
types |= {"P": 80, "PART": scan_inside.PART, "LAST": 16, "N": 128, "STATE": 128, "MASKED": True, "WHOLE": False}
build(scan_inside_kernels.scan_inside_kernel, scan_inside.WARPS, **types)
tiles = scan_output.TILES[0]
types = dict.fromkeys(scan_output_kernels.scan_output_kernel.arg_names, i32)
types |= dict.fromkeys(("x", "b", "c", "states", "y"), bf16s) | dict.fromkeys(("dt", "decay", "d"), floats)
types |= {"seq_idx": halves, "CHUNK": 128, "BLOCK": tiles[0], "HEADS": 8, "GROUPS": 8}
types |= {"P": 80, "WIDTH": 64, "REST": 16, "N": 128, "STATE": 128, "MASKED": True, "STAGES": tiles[2]}
build(scan_output_kernels.scan_output_kernel, tiles[1], **types)
sizes = dict.fromkeys(("length", "heads", "chunks", "dt_batch", "dt_row", "dt_head"), i32) | {"CHUNK": 128}
for kernel in (scan_decay_kernels.scan_decay_kernel, scan_decay_kernels.scan_decay_backward_kernel):
    types = dict.fromkeys(kernel.arg_names, floats) | sizes | {"HEADS": scan_decay.HEADS}
    build(kernel, scan_decay.WARPS, **types)
types = dict.fromkeys(scan_bc_kernels.scan_bc_kernel.arg_names, i32) | dict.fromkeys(("dt", "decay", "shares"), floats)
types |= dict.fromkeys(("rows", "states", "own", "other", "dscores", "out"), bf16s) | {"seq_idx": halves}
types |= {"CHUNK": 128, "TOKENS": scan_bc.TOKENS, "TILE": scan_bc.TILE, "HEADS": 16, "GROUPS": 8, "P": 80, "LAST": 16}
types |= {"PART": scan_bc.PART, "N": 128, "STATE": 128, "MASKED": True}
for of_b in (True, False):
    build(scan_bc_kernels.scan_bc_kernel, scan_bc.WARPS, **types | {"OF_B": of_b})
for kernel in (scan_states_kernels.scan_states_kernel, scan_states_kernels.scan_states_backward_kernel):
    types = dict.fromkeys(kernel.arg_names, i32) | {"seq_idx": halves, "CHUNK": 128, "HEADS": 1, "GROUP_HEADS": 16}
    types |= {name: bf16s for name in ("x", "b", "c", "dy", "states", "dstates") if name in types}
    types |= {name: floats for name in ("dt", "decay", "dtotal") if name in types}
    types |= {"GROUPS": 8, "P": 80, "WIDTH": 128, "N": 128, "SLICE": 128, "MASKED": True}
    build(kernel, 8, **types)
"""


@pytest.mark.parametrize("capability", [80, 90, 100, 103, 120])
def test_compiles_ahead_of_time(capability, tmp_path):
    path = tmp_path / "build.py"
    path.write_text(COMPILE)
    done = subprocess.run(
        [sys.executable, path, str(capability), "all" if capability in (80, 100) else "first"],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
