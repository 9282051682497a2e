from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from nvfp4_train.data.batch import Batch
from nvfp4_train.data.corpora import Corpora
from nvfp4_train.data.sampler import Sampler
from nvfp4_train.data.sequences import GROUP, DocumentSequences, pack
from nvfp4_train.errors import DataError


class Documents:
    """A data set of documents of the given lengths (their eos included); token i of the stream is i + 1."""

    path = "memory"

    def __init__(self, lengths: list[int], eos_id: int = 0) -> None:
        self._ends = np.cumsum(np.array(lengths, dtype=np.int64))
        self.tokenizer = type("Tokenizer", (), {"eos_id": eos_id})

    def n_tokens(self, split: str) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def document_spans(self, split: str, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        begins = np.concatenate([[0], self._ends[:-1]])
        here = (begins < stop) & (self._ends > start)
        return begins[here], self._ends[here]

    def raw_tokens(self, split: str, start: int, stop: int) -> np.ndarray:
        stream = np.arange(1, self.n_tokens(split) + 1)
        stream[self._ends - 1] = self.tokenizer.eos_id
        return np.concatenate([[self.tokenizer.eos_id], stream])[start + 1 : stop + 1]


lengths = st.lists(st.integers(1, 12) | st.integers(1, 200), min_size=1, max_size=120)


@given(lengths=lengths, seq_len=st.integers(2, 40))
@example(lengths=[244, 8], seq_len=8)  # in the tokens after the last whole group no document begins
def test_every_token_is_in_one_sequence_and_none_is_empty(lengths, seq_len):
    sequences = DocumentSequences(Documents(lengths), "train", seq_len)
    found = [sequences.spans(k) for k in range(sequences.count)]
    filled = [sum(stop - start for start, stop in spans) for spans in found]
    assert 1 <= min(filled) <= max(filled) <= seq_len
    spans = sorted(itertools.chain(*found))
    assert spans[0][0] == 0 and spans[-1][1] == sum(lengths)  # noqa: PT018
    assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    ends = np.cumsum(lengths)
    for start, stop in spans:  # within one document
        assert np.searchsorted(ends, start, side="right") == np.searchsorted(ends, stop - 1, side="right")
    assert all(spans == sorted(spans) for spans in found)


def test_documents_that_fit_stay_whole_and_little_is_left_empty():
    rng = np.random.default_rng(0)
    lengths = np.maximum(2, rng.lognormal(np.log(100) - 0.5, 1.0, 20_000)).astype(int).tolist()
    sequences = DocumentSequences(Documents(lengths), "train", 1024)
    spans = set(itertools.chain(*(sequences.spans(k) for k in range(sequences.count))))
    ends = np.cumsum(lengths)
    cut = [
        end
        for n, end in zip(lengths, ends.tolist(), strict=True)
        if n <= 1024 and (end - n, end) not in spans
    ]
    assert len(cut) < 1e-3 * len(lengths)
    assert 1 - ends[-1] / (1024 * sequences.count) < 1.1 / GROUP


@given(
    lengths=st.lists(st.integers(1, 16), min_size=1, max_size=60),
    size=st.integers(16, 20),
    slack=st.integers(0, 9),
)
def test_packing_keeps_all_in_bins_that_just_suffice(lengths, size, slack):
    ends = np.cumsum(lengths)
    bins = min(-(-int(ends[-1]) // size) + slack, int(ends[-1]))
    packed = pack(ends - lengths, ends, bins, size)
    covered = sorted(itertools.chain(*(range(a, b) for spans in packed for a, b in spans)))
    assert covered == list(range(ends[-1]))
    assert all(1 <= sum(b - a for a, b in spans) <= size for spans in packed)


@given(lengths=lengths, seq_len=st.integers(2, 40), reset=st.booleans(), batch_size=st.integers(1, 5))
def test_a_batch_of_documents_predicts_each_token_from_the_one_before(lengths, seq_len, reset, batch_size):
    data = Documents(lengths)
    sampler = Sampler(
        Corpora({"text": data}, packing="documents"),
        seq_len=seq_len,
        global_batch_size=batch_size,
        seed=3,
        reset_state_at_documents=reset,
    )
    stream = data.raw_tokens("train", -1, sum(lengths))
    where = {token: i for i, token in enumerate(stream.tolist()) if token}
    batch = sampler.batch(0)
    _, _, numbers = sampler.sequences(0)
    sequences = DocumentSequences(data, "train", seq_len)
    for row, number in enumerate(numbers.tolist()):
        spans = sequences.spans(number)
        total = sum(stop - start for start, stop in spans)
        counted = torch.ones(seq_len, dtype=bool) if batch.mask is None else batch.mask[row]
        assert counted.tolist() == [i < total for i in range(seq_len)]
        targets = batch.targets[row][counted].tolist()
        assert targets == list(itertools.chain(*(stream[a + 1 : b + 1].tolist() for a, b in spans)))
        for token, target in zip(batch.tokens[row][counted].tolist(), targets, strict=True):
            if target:
                assert token == stream[where[target] - 1]
        if reset:
            document = np.repeat(np.arange(len(spans) + 1), [*(b - a for a, b in spans), seq_len - total])
            assert (
                batch.seq_idx[row].tolist() == document.tolist()
            )  # each span is a document; the rest another
    assert (batch.seq_idx is not None) == reset


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_a_corpus_smaller_than_one_sequence(packing):
    tiny, empty = (Corpora({"text": Documents(lengths)}, packing=packing) for lengths in ([3, 4], []))
    if packing == "stream":
        with pytest.raises(DataError, match=r"data\.packing=documents"):
            Sampler(tiny, seq_len=16, global_batch_size=3, seed=0)
    else:
        sampler = Sampler(tiny, seq_len=16, global_batch_size=3, seed=0)
        assert sampler.batch(5).mask.sum(1).tolist() == [7, 7, 7]
    with pytest.raises(DataError, match=r"no tokens to train on|less than one sequence"):
        Sampler(empty, seq_len=16, global_batch_size=1, seed=0)


def test_cumulative_lengths_are_those_of_the_documents_in_each_row():
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    seq_idx = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0]], dtype=torch.int32)
    assert Batch(tokens, tokens, seq_idx=seq_idx).cu_seqlens().tolist() == [0, 2, 5, 6, 12]
    assert Batch(tokens, tokens).cu_seqlens().tolist() == [0, 6, 12]
    assert Batch(tokens, tokens).cu_seqlens().dtype == torch.int32
