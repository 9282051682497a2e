"""Text from a model, token by token, with its decoding state (SSM states, keys and values)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from nvfp4_train.data.tokenizer import Tokenizer
from nvfp4_train.errors import UserError
from nvfp4_train.model.hybrid import HybridModel, join_caches

_PARAMETERS_A_THREAD = (
    20_000_000  # fewer, and the threads of a CPU wait for each other longer than they compute
)


def sample_tokens(
    model: HybridModel,
    prompt: Sequence[int],
    n_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    device: torch.device | str,
) -> Iterator[int]:
    """`n_tokens` new tokens after `prompt` (at least one token), one at a time; see `sample_batch`."""
    for (token,) in sample_batch(model, [prompt], n_tokens, temperature, top_p, [seed], device):
        yield token


@torch.no_grad()
def sample_batch(
    model: HybridModel,
    prompts: Sequence[Sequence[int]],
    n_tokens: int,
    temperature: float,
    top_p: float,
    seeds: Sequence[int],
    device: torch.device | str,
    ends: Callable[[list[list[int]]], bool] = lambda written: False,
) -> Iterator[list[int]]:
    """`n_tokens` new tokens after each of `prompts` (of any lengths, at least one token each), one of each at a time.

    Temperature 0 takes the likeliest token. Every sequence draws from its own seed. It ends early when `ends`, given all
    that has been written, says so. A prompt runs through the model in one go, by itself; then all sequences together,
    a token at a time. The precision is the one the model is in. NVFP4 quantizes activations in 1x16 blocks along features,
    so a token is quantized as in training; only its tensor scale spans the prompt, or the batch's newest tokens, and not a
    micro-batch. The same arguments give the same tokens on the same device. Raises UserError when the model's outputs
    are not finite.
    """
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    caches, first = [], []
    for prompt in prompts:
        caches.append(model.new_cache(1, device))
        first.append(model.prefill(torch.tensor([list(prompt)], device=device), caches[-1]))
    logits, cache = torch.cat(first), caches[0] if len(caches) == 1 else join_caches(caches)
    written: list[list[int]] = [[] for _ in prompts]
    for i in range(n_tokens):
        rows = logits.float().cpu()
        tokens = [choose(row, temperature, top_p, g) for row, g in zip(rows, generators, strict=True)]
        for sequence, token in zip(written, tokens, strict=True):
            sequence.append(token)
        yield tokens
        if i + 1 == n_tokens or ends(written):
            return
        with _threads_for(model):
            logits = model.step(torch.tensor(tokens, device=device), cache)


def choose(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """A token drawn from softmax(logits / temperature) within its likeliest tokens of joint probability top_p.

    logits: fp32 [vocab_size] on the CPU. At least one token is always within; temperature 0 takes the likeliest.
    """
    if not logits.isfinite().all():
        raise UserError("The model's outputs are not finite (NaN or infinity): use an earlier checkpoint.")
    if temperature == 0:
        return int(logits.argmax())
    probabilities, tokens = (logits / temperature).softmax(-1).sort(descending=True, stable=True)
    before = probabilities.cumsum(-1) - probabilities
    kept = probabilities.where(before < top_p, 0)
    kept[0] = probabilities[0]
    return int(tokens[torch.multinomial(kept, 1, generator=generator)])


def stream_text(tokens: Iterator[int], tokenizer: Tokenizer) -> Iterator[str]:
    """The text of tokens as it becomes known (a character may take several), up to the document's end."""
    pending: list[int] = []
    for token in tokens:
        if token == tokenizer.eos_id:
            break
        pending.append(token)
        text = tokenizer.decode(pending)
        # U+FFFD at the end is a character that is not whole yet; UTF-8 has at most four bytes.
        if not text.endswith("\ufffd") or len(pending) >= 4:
            yield text
            pending = []
    if pending:
        yield tokenizer.decode(pending)


def start_document(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The tokens of a document that begins with `prompt`: in training an eos stands before every document."""
    return [tokenizer.eos_id, *tokenizer.encode(prompt)]


def sample_text(
    model: HybridModel,
    tokenizer: Tokenizer,
    prompt: str,
    n_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    device: torch.device | str,
) -> str:
    """`prompt` and up to `n_tokens` tokens that continue it as a document's beginning; see `sample_tokens`."""
    tokens = sample_tokens(
        model, start_document(tokenizer, prompt), n_tokens, temperature, top_p, seed, device
    )
    return prompt + "".join(stream_text(tokens, tokenizer))


@contextlib.contextmanager
def _threads_for(model: HybridModel) -> Iterator[None]:
    """As many CPU threads as a step of one token can feed."""
    before = torch.get_num_threads()
    torch.set_num_threads(
        max(1, min(before, sum(p.numel() for p in model.parameters()) // _PARAMETERS_A_THREAD))
    )
    try:
        yield
    finally:
        torch.set_num_threads(before)
