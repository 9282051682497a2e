"""The quantized linear on meta tensors: shapes and dtypes without data."""

import torch

from nvfp4_train.precision.linear import Linear
from nvfp4_train.precision.recipe import OPERANDS, LinearPlan

PLAN = LinearPlan(frozenset(OPERANDS))
N_IN, N_OUT = 128, 256


def test_shapes_without_data():
    with torch.device("meta"):
        linear = Linear(N_IN, N_OUT)
    linear.set_plan(PLAN, torch.empty(4, dtype=torch.int64, device="meta"))
    linear.fprop_weight = linear.dgrad_weight = torch.empty(N_OUT, N_IN, dtype=torch.bfloat16, device="meta")
    linear.weight_amax = torch.empty((), device="meta")
    x = torch.empty(2, 16, N_IN, dtype=torch.bfloat16, device="meta", requires_grad=True)
    y = linear(x)
    assert y.shape == (2, 16, N_OUT)
    y.backward(torch.empty_like(y))
    assert x.grad.shape == x.shape
    assert linear.weight.grad.dtype == torch.float32
