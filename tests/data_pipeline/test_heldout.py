from __future__ import annotations

import gzip
import lzma

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4_train.data.baselines import Baselines
from nvfp4_train.data.validation import iterate_valid


@settings(max_examples=60, deadline=None)
@given(
    seq_len=st.integers(1, 300),
    batch_size=st.integers(1, 9),
    max_tokens=st.one_of(st.none(), st.integers(0, 5000)),
    reset=st.booleans(),
)
def test_every_token_is_a_target_once_and_the_bytes_add_up(dataset, seq_len, batch_size, max_tokens, reset):
    total = dataset.n_tokens("valid")
    stream = dataset.tokens("valid", 0, total)
    targets, inputs, n_bytes = [], [], 0
    for batch, batch_bytes in iterate_valid(dataset, seq_len, batch_size, max_tokens, reset):
        assert batch.tokens.shape == batch.targets.shape == (batch_size, seq_len)
        counted = np.ones(batch.tokens.shape, bool) if batch.mask is None else batch.mask.numpy()
        assert counted.any()
        counted_targets = batch.targets.numpy()[counted]
        text = dataset.tokenizer.decode(counted_targets.tolist())
        assert batch_bytes == dataset.tokenizer.byte_lengths[counted_targets].sum()
        assert "\ufffd" in text or batch_bytes == len(text.encode())
        targets += counted_targets.tolist()
        inputs += batch.tokens.numpy()[counted].tolist()
        n_bytes += batch_bytes
        assert (batch.seq_idx is not None) == reset
    expected = total if max_tokens is None else min(total, max_tokens)
    assert targets == stream[:expected].tolist()
    assert inputs == [dataset.tokenizer.eos_id, *stream[: expected - 1].tolist()][:expected]
    if expected == total:
        assert n_bytes == dataset.n_bytes("valid") == dataset.documents("valid")[:, 1].sum()


def test_baselines_are_those_of_the_held_out_documents(dataset):
    starts = [0, *dataset.documents("valid")[:-1, 0].tolist()]
    ends = dataset.documents("valid")[:, 0].tolist()
    texts = [
        dataset.tokenizer.decode(dataset.tokens("valid", a, b).tolist()).encode()
        for a, b in zip(starts, ends, strict=True)
    ]
    n = sum(map(len, texts))
    baselines = dataset.baselines()
    assert baselines["gzip"] == pytest.approx(8 * sum(len(gzip.compress(t, 9)) for t in texts) / n, abs=1e-12)
    assert baselines["xz"] == pytest.approx(8 * len(lzma.compress(b"".join(texts), preset=9)) / n, rel=0.01)


def test_baselines_stop_at_their_limit(monkeypatch):
    monkeypatch.setattr("nvfp4_train.data.baselines.MAX_BYTES", 100)
    baselines = Baselines()
    for _ in range(5):
        baselines.add(b"x" * 60)
    assert baselines.finish()["bytes"] == 120
