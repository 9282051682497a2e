"""Likelihoods of continuations, and texts up to a word, against their definitions in fp32."""

from __future__ import annotations

import pytest
import torch

from nvfp4_train.model.hybrid import HybridModel
from nvfp4_train.training import scoring
from nvfp4_train.training.sampling import sample_tokens
from nvfp4_train.training.scoring import log_likelihoods, write_until


@pytest.fixture
def exact(tiny_run):
    model = HybridModel(tiny_run.cfg.model, compute_dtype=torch.float32).requires_grad_(False)
    model.load_state_dict(tiny_run.model.state_dict())
    return model


@pytest.mark.parametrize("batch_tokens", [1, 60, 10_000])
def test_log_likelihoods_in_batches_of_several_lengths(exact, monkeypatch, batch_tokens):
    monkeypatch.setattr(scoring, "BATCH_TOKENS", batch_tokens)
    gen = torch.Generator().manual_seed(0)
    lengths = [(1, 1), (7, 3), (30, 1), (2, 19), (11, 11)]
    pairs = [[torch.randint(384, (n,), generator=gen).tolist() for n in pair] for pair in lengths]
    context = pairs[1][0]
    pairs.append([context, list(sample_tokens(exact, context, 5, 0.0, 1.0, 0, "cpu"))])
    results = log_likelihoods(exact, pairs)
    for (before, after), (value, greedy) in zip(pairs, results, strict=True):
        logits = exact(torch.tensor([before + after]))[0, len(before) - 1 : -1].double()
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(after)[:, None]).sum()
        assert value == pytest.approx(float(expected), rel=1e-5)
        assert greedy == (logits.argmax(-1).tolist() == after)
    assert results[-1][1]


def test_texts_end_at_a_stop_word_the_documents_end_or_the_limit(exact, tiny_run):
    tokenizer, prompts = tiny_run.dataset.tokenizer, [[1, 70, 80], [1]]
    whole = write_until(exact, tokenizer, prompts, [], 24, 0.0, 1.0, 0)
    assert [len(text) > 8 for text in whole] == [True, True]
    stop = whole[0][3:5]
    cut = write_until(exact, tokenizer, prompts, [stop, "no such text"], 24, 0.0, 1.0, 0)
    assert cut[0] == whole[0][: whole[0].index(stop)]
    assert cut[1] == (whole[1][: whole[1].index(stop)] if stop in whole[1] else whole[1])
    tokens = list(sample_tokens(exact, prompts[1], 3, 0.0, 1.0, 0, "cpu"))
    assert write_until(exact, tokenizer, prompts[1:], [], 3, 0.0, 1.0, 0) == [tokenizer.decode(tokens)]
