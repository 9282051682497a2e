import math

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from nvfp4_train.training.finite import SkipCounter, update_is_finite

GOOD = torch.tensor(1.5)


def test_finite_values_are_one_and_float32():
    finite = update_is_finite(GOOD, torch.tensor(0.0), [GOOD, torch.tensor([1.0, 3e38])])
    assert finite.dtype == torch.float32
    assert finite.shape == ()
    assert finite.item() == 1.0
    assert update_is_finite(GOOD.bfloat16(), GOOD.double()).item() == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", range(4))
def test_one_bad_value_anywhere_is_zero(bad, place):
    values = [GOOD.clone(), GOOD.clone(), GOOD.clone(), torch.tensor([1.0, 2.0])]
    values[place].view(-1)[-1] = bad
    assert update_is_finite(values[0], values[1], values[2:]).item() == 0.0


def test_counts_skips_in_a_row_and_in_all():
    counter = SkipCounter("cpu")
    seen = []
    for finite in (1.0, 0.0, 0.0, 1.0, 0.0):
        counter.update(torch.tensor(finite))
        seen.append((counter.consecutive.item(), counter.total.item()))
    assert seen == [(0, 0), (1, 1), (2, 2), (0, 2), (1, 3)]

    restored = SkipCounter("cpu")
    restored.load_state_dict(counter.state_dict())
    counter.update(torch.tensor(1.0))
    restored.update(torch.tensor(0.0))
    assert (restored.consecutive.item(), restored.total.item()) == (2, 4)
    assert (counter.consecutive.item(), counter.total.item()) == (0, 3)


def _rank(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    bad_on_one = torch.tensor(math.nan if rank == 1 else 1.0)
    answers = [update_is_finite(value, GOOD, group=dist.group.WORLD).item() for value in (bad_on_one, GOOD)]
    torch.save(answers, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_ranks_agree_when_one_is_bad(tmp_path):
    mp.spawn(_rank, args=(str(tmp_path),), nprocs=2)
    assert [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)] == [[0.0, 1.0], [0.0, 1.0]]
