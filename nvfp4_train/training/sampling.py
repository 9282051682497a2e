"""Text from a model, token by token, with its decoding state (SSM states, keys and values)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nvfp4_train.data.tokenizer import Tokenizer
from nvfp4_train.errors import UserError
from nvfp4_train.model.hybrid import HybridModel

_PARAMETERS_A_THREAD = (
    20_000_000  # fewer, and the threads of a CPU wait for each other longer than they compute
)


@torch.no_grad()
def sample_tokens(
    model: HybridModel,
    prompt: Sequence[int],
    n_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    device: torch.device | str,
) -> Iterator[int]:
    """`n_tokens` new tokens after `prompt` (at least one token), one at a time; temperature 0 takes the likeliest.

    The precision is the one the model is in. NVFP4 quantizes activations in 1x16 blocks along features, so one token
    is quantized as in training; only its tensor scale spans this token alone, and not a micro-batch. The same
    arguments give the same tokens on the same device. Raises UserError when the model's outputs are not finite.
    """
    generator = torch.Generator().manual_seed(seed)
    with _threads_for(model):
        cache = model.new_cache(1, device)
        for token in prompt:
            logits = model.step(torch.tensor([token], device=device), cache)
    for _ in range(n_tokens):
        token = choose(logits[0].float().cpu(), temperature, top_p, generator)
        yield token
        with _threads_for(model):
            logits = model.step(torch.tensor([token], device=device), cache)


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
