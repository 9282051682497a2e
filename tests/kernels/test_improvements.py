"""Four over six and MS-EDEN: their arithmetic, written out, and what they are for."""

import numpy as np
import torch
from nvfp4_kernels import CounterKey, hadamard16, quantize, quantize_four_over_six
from nvfp4_kernels.format import E2M1_VALUES, unpack
from nvfp4_kernels.hadamard import hadamard
from nvfp4_kernels.ms_eden import LIMIT, quantize_ms_eden, rotation_signs, rotation_size, round_scale

E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()


def nearest(grid, values):
    """The nearest of `grid`; of two, the one with the even index."""
    distance = np.abs(values[..., None] - grid)
    best = distance.argmin(-1)
    other = np.minimum(best + 1, len(grid) - 1)
    tie = np.take_along_axis(distance, other[..., None], -1)[..., 0] == distance.min(-1)
    return grid[np.where(tie & (best % 2 == 1), other, best)]


def test_four_over_six_keeps_the_better_of_both_scales():
    normal, uniform = torch.randn(64, 256).bfloat16(), (torch.rand(64, 256) * 2 - 1).bfloat16()
    for block, height, x in (((1, 16), 1, normal), ((16, 16), 16, uniform)):
        amax = x.abs().amax().float()
        got = quantize_four_over_six(x, block, amax).dequantize(torch.float64).numpy()
        tiles = x.double().numpy().reshape(64 // height, height, 16, 16).transpose(0, 2, 1, 3)
        unit = float(amax) / 1536
        candidates, errors = [], []
        for factor in (1.0, 1.5):
            scale = nearest(E4M3, np.abs(tiles).max((2, 3)) / 6 * factor / unit)[..., None, None] * unit
            q = np.sign(tiles) * nearest(np.array(E2M1_VALUES[:8]), np.minimum(np.abs(tiles) / scale, 6))
            candidates.append(q * scale)
            errors.append(np.abs(tiles - q * scale).sum((2, 3), keepdims=True))
        four = errors[1] < errors[0]
        clear = np.abs(errors[1] - errors[0]) > 1e-5 * errors[0]  # else fp32 sums may decide either way
        assert 0.1 < four.mean() < 0.9
        assert clear.mean() > 0.99
        expected = np.where(four, candidates[1], candidates[0])
        got = got.reshape(64 // height, height, 16, 16).transpose(0, 2, 1, 3)
        same = np.isclose(got, expected, rtol=1e-5, atol=0).all((2, 3), keepdims=True)
        assert same[clear].mean() > 0.99  # fp64 here may round a scale or an element on a tie the other way


def test_four_over_six_lowers_the_error():
    normal, uniform = torch.randn(512, 512).bfloat16(), (torch.rand(512, 512) * 2 - 1).bfloat16()
    for block, x in (((1, 16), normal), ((16, 16), uniform)):
        amax = x.abs().amax().float()
        errors = [
            (q.dequantize() - x.float()).square().mean() / x.float().square().mean()
            for q in (quantize(x, block), quantize_four_over_six(x, block, amax))
        ]
        assert errors[1] < (0.87 if block[0] == 1 else 0.98) * errors[0]
    operand = quantize_four_over_six(x, (1, 16), amax, output="operand")
    assert torch.equal(operand.dequantize(), quantize_four_over_six(x, (1, 16), amax).dequantize())
    zero = quantize_four_over_six(torch.zeros(16, 32), (1, 16), torch.zeros(()))
    assert not zero.dequantize().any()


def test_rotations():
    assert [rotation_size(n) for n in (16, 48, 1088, 4096)] == [16, 16, 64, 128]
    signs = rotation_signs(CounterKey(1, 2, 3, 4), 128, torch.device("cpu"))
    assert set(signs.tolist()) == {-1.0, 1.0}
    assert 40 < (signs > 0).sum() < 88
    assert torch.equal(signs[:32], rotation_signs(CounterKey(1, 2, 3, 4), 32, torch.device("cpu")))
    assert not torch.equal(signs, rotation_signs(CounterKey(1, 3, 3, 4), 128, torch.device("cpu")))
    eye = hadamard(torch.eye(64).bfloat16(), signs[:64]).double()
    assert torch.equal(eye @ eye.t(), torch.eye(64).double())
    x = torch.randn(4, 32).bfloat16()
    assert torch.equal(hadamard16(x), hadamard(x, (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)))


def test_scales_are_rounded_to_their_neighbours_with_the_right_mean():
    wanted = torch.cat((torch.rand(200) * 440 + 0.01, torch.tensor([2**-9 * 1.5, 0.02, 1.0, 447.9])))
    draws = torch.arange(256)[:, None].expand(256, len(wanted))
    got = round_scale(wanted.expand_as(draws), draws).double()
    below = torch.tensor([E4M3[w >= E4M3].max() for w in wanted.double().tolist()])
    above = torch.tensor([E4M3[w <= E4M3].min() for w in wanted.double().tolist()])
    assert ((got == below) | (got == above)).all()
    assert ((got.mean(0) - wanted.double()).abs() <= (above - below) / 512 + 1e-12).all()


def test_ms_eden_as_written_out():
    x = torch.randn(8, 256).bfloat16()
    key = CounterKey(7, 1, 0, 3)
    signs = rotation_signs(key, 128, torch.device("cpu"))
    q = quantize_ms_eden(x, signs, key)
    turned = hadamard(x, signs).double().numpy().reshape(8, 16, 16)
    unit = np.abs(turned).max() / (255.99 * LIMIT)
    scale = nearest(E4M3, np.abs(turned).max(-1) / LIMIT / unit)
    y = turned / (scale * unit)[..., None]
    e2m1 = np.sign(y) * nearest(np.array(E2M1_VALUES[:8]), np.minimum(np.abs(y), 6))
    codes = torch.tensor(E2M1_VALUES, dtype=torch.float64)[unpack(q.codes).int()].numpy().reshape(8, 16, 16)
    assert (codes == e2m1).mean() > 0.999
    groups = (8, 2, 128)
    factor = (y * y).reshape(groups).sum(-1) / (y * e2m1).reshape(groups).sum(-1)
    ratio = q.scales.double().numpy() / (scale * np.repeat(factor, 8, axis=1))
    assert (np.abs(ratio - 1) < 1 / 8 + 1e-6).all()  # a neighbour in E4M3
    assert abs(ratio.mean() - 1) < 0.02


def test_ms_eden_is_unbiased_and_halves_the_error():
    x = (torch.randn(16, 128) * torch.exp(torch.randn(16, 1))).bfloat16()
    n, total, noise, plain = 400, 0, 0.0, 0.0
    for step in range(n):
        key = CounterKey(3, step, 0, 0)
        signs = rotation_signs(key, 128, x.device)
        h = hadamard(torch.eye(128).bfloat16(), signs).double()  # rows: the rotation of each unit vector
        back = quantize_ms_eden(x, signs, key).dequantize(torch.float64) @ h.t()
        back = back / (h @ h.t()).diagonal()  # bf16(1 / sqrt(128)) is not exact
        total = total + back
        noise += (back - x.double()).square().sum(1)
        plain += (
            (quantize(x, rounding="stochastic", key=key).dequantize(torch.float64) - x.double())
            .square()
            .sum(1)
        )
    square = x.double().square().sum(1)
    gain = (total / n * x.double()).sum(1) / square - 1
    standard = (noise / n / square).sqrt() / n**0.5  # of the projection, at most that of the whole error
    assert (gain.abs() < 5 * standard).all()
    assert ((total / n - x.double()).square().sum(1) / square < 1.5 * noise / n / square / n).all()
    assert noise.sum() < 0.6 * plain.sum()
