"""The traffic plan in numbers that users were promised."""

from __future__ import annotations

import pytest

from nvfp4_train.config.layout import layout_of
from nvfp4_train.config.load import compose_config
from nvfp4_train.distributed.traffic import Traffic, bf16_plan, plan
from nvfp4_train.model.hybrid import HybridModel

PACKED = ["parallel.weight_gather=nvfp4", "parallel.grad_reduce=nvfp4"]
QUICKSTART = ["+experiment=quickstart", "training.micro_batch_size=2", "parallel.fsdp=4"]
LARGE = [
    "+experiment=12b_hybrid",
    "training.global_batch_size=768",
    "parallel.fsdp=64",
    "parallel.replicate=4",
]


@pytest.mark.parametrize("words", [QUICKSTART, LARGE], ids=["quickstart", "12b_hybrid"])
def test_quantized_tensors_travel_in_a_quarter_of_bf16(words):
    cfg = compose_config([*words, *PACKED])
    shapes = {name: tuple(p.shape) for name, p in HybridModel(cfg.model, "meta").named_parameters()}
    sent, bf16 = (f(shapes, cfg, layout_of(cfg)) for f in (plan, bf16_plan))
    assert sent["weights/quantized"] / bf16["weights/quantized"] <= 0.255
    assert sent["gradients/quantized"] / bf16["gradients/quantized"] <= 0.285
    assert sent["weights/other"] == bf16["weights/other"]


def test_what_a_ring_sends():
    traffic = Traffic()
    traffic.all_gather("a", 100, 4)
    traffic.reduce_scatter("b", 100, 4)
    traffic.all_reduce("c", 100, 4)
    assert traffic.take() == {"a": 300, "b": 75, "c": 150}
    assert traffic.take() == {}
