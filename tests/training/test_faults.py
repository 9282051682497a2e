import math

import pytest
import torch
from torch import nn

from nvfp4_train.config.schema import FaultConfig
from nvfp4_train.data.batch import Batch
from nvfp4_train.errors import ConfigError
from nvfp4_train.training.faults import Faults, flip_bit
from nvfp4_train.training.history import History, Rewind

NONE = History()
REWOUND = History((Rewind("why", 5, 9, 2, None, 2),))


def faults(here=0, **values):
    return Faults([FaultConfig(**values)], here, vocab_size=50)


def test_a_fault_strikes_at_its_steps_until_a_rewind_unless_it_repeats():
    once, always = (
        faults(kind="lr", step=5, steps=3, factor=7.0),
        faults(kind="lr", step=5, factor=7.0, repeat=True),
    )
    assert [once.lr_factor(step, NONE) for step in (4, 5, 7, 8)] == [1.0, 7.0, 7.0, 1.0]
    assert once.lr_factor(5, REWOUND) == once.lr_factor(7, REWOUND) == 1.0
    assert always.lr_factor(5, REWOUND) == 7.0


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"kind": "nan", "step": 3, "rank": 2}, "rank=2 is not one of the 2 ranks"),
        ({"kind": "lr", "step": 11}, "step=11 comes after the run's last step, 10"),
        ({"kind": "bit_flip", "step": 3, "tensor": "nosuch*"}, "'nosuch.*' is the name of no weight"),
    ],
)
def test_a_fault_that_would_never_strike_is_refused(values, what):
    with pytest.raises(ConfigError, match=what):
        faults(**values).check(2, 10, nn.Linear(3, 2))
    faults(kind="bit_flip", step=10, tensor="w*", rank=1).check(2, 10, nn.Linear(3, 2))


def test_gradients_of_all_ranks_or_of_one():
    assert faults(1, kind="gradient", step=3, factor=100.0).gradient_scale(3, NONE) == 100.0
    assert math.isnan(faults(0, kind="nan", step=3).gradient_scale(3, NONE))
    assert faults(1, kind="nan", step=3).gradient_scale(3, NONE) == 1.0
    assert math.isnan(faults(1, kind="nan", step=3, rank=1).gradient_scale(3, NONE))


def test_one_bit_of_one_weight_flips_for_good():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    fault = faults(kind="bit_flip", step=3, steps=5, tensor="1.w*", bit=30)
    for step in range(1, 6):
        fault.before_step(step, NONE, model)
    changed = {name: (p != before[name]).sum().item() for name, p in model.named_parameters()}
    assert changed == {"0.weight": 0, "0.bias": 0, "1.weight": 1, "1.bias": 0}
    flip_bit(model, "1.weight", 30)
    assert torch.equal(model[1].weight, before["1.weight"])
    flip_bit(model, "1.weight", 31)
    assert model[1].weight[0, 0] == -before["1.weight"][0, 0]


@pytest.mark.parametrize("kind", ["repeated_tokens", "random_tokens"])
def test_a_poisoned_batch_is_the_same_however_it_is_split(kind):
    tokens = torch.arange(32).view(4, 8)
    batch, fault = Batch(tokens, tokens + 1), faults(kind=kind, step=7, steps=2)
    whole = fault.poison(7, 0, batch)
    halves = [fault.poison(7, start, batch.rows(start, start + 2)) for start in (0, 2)]
    assert torch.equal(whole.tokens, torch.cat([half.tokens for half in halves]))
    assert torch.equal(whole.targets[:, :-1], whole.tokens[:, 1:])
    assert 0 <= whole.tokens.min() <= whole.tokens.max() < 50
    assert len(whole.tokens.unique()) == 1 if kind == "repeated_tokens" else len(whole.tokens.unique()) > 10
    assert fault.poison(5, 0, batch) is batch
    assert fault.poison(8, 0, batch) is batch


def test_reading_fails_so_many_times():
    fault = faults(kind="read_error", step=4, steps=2)
    fault.check_readable(2)
    for _ in range(2):
        with pytest.raises(OSError, match="rehearsed"):
            fault.check_readable(3)
    fault.check_readable(3)
