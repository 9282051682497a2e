"""How likely a model finds continuations, and texts that it writes until a word: what benchmarks ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F

from nvfp4_train.data.tokenizer import Tokenizer
from nvfp4_train.model.hybrid import HybridModel
from nvfp4_train.training.sampling import sample_batch

BATCH_TOKENS = 8192  # of one forward pass, padding included


@torch.no_grad()
def log_likelihoods(
    model: HybridModel,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    progress: Callable[[int], None] = lambda done: None,
) -> list[tuple[float, bool]]:
    """For each (context, continuation), both of at least one token: the continuation's log probability (nats) after the
    context, and whether it is what greedy decoding writes.

    Sequences of like length run together, padded on the right, where no token sees the padding; in NVFP4 it counts for
    the tensor scales alone. Logits are made for continuations only.
    """
    device = model.lm_head.weight.device
    results: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
    order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][0]) - len(pairs[i][1]))
    done = 0
    while done < len(order):
        longest = sum(map(len, pairs[order[done]])) - 1
        batch = order[done : done + max(1, BATCH_TOKENS // longest)]
        rows = [[*pairs[i][0], *pairs[i][1]] for i in batch]
        tokens = torch.tensor([row[:-1] + [0] * (longest - len(row) + 1) for row in rows], device=device)
        hidden = model.hidden(tokens)
        for i, row, states in zip(batch, rows, hidden, strict=True):
            n = len(pairs[i][1])
            logits = F.linear(states[len(row) - 1 - n : len(row) - 1], model.lm_head.weight.to(states.dtype))
            log_probabilities = logits.float().log_softmax(-1)
            targets = torch.tensor(row[-n:], device=device)
            total = log_probabilities.gather(-1, targets[:, None]).double().sum()
            results[i] = (float(total), bool((log_probabilities.argmax(-1) == targets).all()))
        done += len(batch)
        progress(len(batch))
    return results


def write_until(
    model: HybridModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    stops: Sequence[str],
    n_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
) -> list[str]:
    """What the model writes after each prompt (token ids), up to the first of `stops`, the document's end or `n_tokens`."""

    def text(tokens: list[int]) -> tuple[str, bool]:
        """What is written so far, cut, and whether it has ended."""
        ended = tokenizer.eos_id in tokens
        whole = tokenizer.decode(tokens[: tokens.index(tokenizer.eos_id)] if ended else tokens)
        cuts = [at for stop in stops if stop and (at := whole.find(stop)) >= 0]
        return (whole[: min(cuts)], True) if cuts else (whole, ended)

    written: list[list[int]] = [[] for _ in prompts]
    for tokens in sample_batch(
        model,
        prompts,
        n_tokens,
        temperature,
        top_p,
        [seed + i for i in range(len(prompts))],
        model.lm_head.weight.device,
        ends=lambda sequences: all(text(sequence)[1] for sequence in sequences),
    ):
        for sequence, token in zip(written, tokens, strict=True):
            sequence.append(token)
    return [text(sequence)[0] for sequence in written]
