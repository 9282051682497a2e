"""The hybrid language model: one residual block a pattern letter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nvfp4_train.config.schema import ModelConfig
from nvfp4_train.errors import ConfigError
from nvfp4_train.model.attention import Attention, pad_cache
from nvfp4_train.model.loss import head_loss, slice_loss
from nvfp4_train.model.mamba2 import Mamba2
from nvfp4_train.model.mlp import MLP
from nvfp4_train.model.norm import RMSNorm, accumulation_dtype

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MIXERS = {"M": Mamba2, "*": Attention, "-": MLP}


class Block(nn.Module):
    """x + mixer(norm(x)); the letter says which mixer."""

    def __init__(self, letter: str, cfg: ModelConfig, device: torch.device | str | None = None):
        super().__init__()
        self.norm = RMSNorm(cfg.hidden_size, cfg.norm_eps, device)
        self.mixer = MIXERS[letter](cfg, device)

    def forward(self, x: Tensor, seq_idx: Tensor | BlockMask | None = None) -> Tensor:
        """x [B, S, hidden_size] in the compute dtype; seq_idx None, integer [B, S] document numbers, or the attention's
        mask (`HybridModel.attention_mask`)."""
        return x + self.mixer(self.norm(x, into=self.mixer.entry), seq_idx)

    def prefill(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        """`forward` over the first tokens; the empty cache becomes that after the last of them."""
        return x + self.mixer.prefill(self.norm(x, into=self.mixer.entry), cache)

    def step(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        """One token x [B, 1, hidden_size]; the cache moves on in place."""
        return x + self.mixer.step(self.norm(x, into=self.mixer.entry), cache)


class Head(nn.Module):
    """The output head: weight [vocab_size, hidden_size], no bias."""

    def __init__(self, cfg: ModelConfig, device: torch.device | str | None = None):
        super().__init__()
        self.weight = nn.Parameter(_empty(cfg, device))
        self.slice_loss = slice_loss  # or another of its signature: kernels.choose_kernels

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., hidden_size] -> logits [..., vocab_size], fp32 (fp64 for fp64), multiplied in hidden's dtype."""
        logits = F.linear(hidden, self.weight.to(hidden.dtype))
        return logits.to(accumulation_dtype(hidden.dtype))

    def loss(self, hidden: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
        """The summed negative log likelihood of targets [T] after hidden [T, hidden_size]; see `loss.head_loss`."""
        return head_loss(hidden, self.weight, targets, mask, self.slice_loss)


class HybridModel(nn.Module):
    """Nemotron-H's stack: embeddings, blocks, final norm, untied head; no position embedding, no linear biases.

    Parameters are fp32, the master weights themselves, and uninitialised until `init.initialize_` or a checkpoint
    fills them; activations are in compute_dtype. Names are Hugging Face's without the prefix "backbone.", but
    for qkv_proj, which is q_proj, k_proj and v_proj in one. Everywhere seq_idx is None or integer [B, S]: in every
    row non-decreasing, one number a document; then documents don't see each other.

    Raises ConfigError on a pattern letter that is no block.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        device: torch.device | str | None = None,
        compute_dtype: torch.dtype = torch.bfloat16,
    ):
        super().__init__()
        for letter in cfg.pattern:
            if letter not in MIXERS:
                raise ConfigError(
                    f"model.pattern={cfg.pattern!r} has the letter {letter!r}, which is no block: use M (Mamba-2), "
                    "* (attention) and - (MLP)"
                )
        self.cfg = cfg
        self.compute_dtype = compute_dtype
        self.recompute_blocks = False  # set by recompute.apply_recompute
        self.attention_mask = document_numbers  # or another: kernels.choose_kernels
        self.embeddings = nn.Embedding(
            cfg.vocab_size, cfg.hidden_size, device=device, _weight=_empty(cfg, device)
        )
        self.layers = nn.ModuleList(Block(letter, cfg, device) for letter in cfg.pattern)
        self.norm_f = RMSNorm(cfg.hidden_size, cfg.norm_eps, device)
        self.lm_head = Head(cfg, device)

    def double(self) -> HybridModel:
        """Parameters and all arithmetic in fp64 (for tests and error measurements)."""
        self.compute_dtype = torch.float64
        return super().double()

    def hidden(self, tokens: Tensor, seq_idx: Tensor | None = None) -> Tensor:
        """tokens int64 [B, S] -> the final norm's output [B, S, hidden_size] in compute_dtype."""
        x = self.embeddings(tokens).to(self.compute_dtype)
        recompute = self.recompute_blocks and torch.is_grad_enabled()
        mask = self.attention_mask(seq_idx, tokens)
        for layer in self.layers:
            seen = mask if isinstance(layer.mixer, Attention) else seq_idx
            if recompute:
                x = checkpoint(layer, x, seen, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, seen)
        return self.norm_f(x)

    def forward(self, tokens: Tensor, seq_idx: Tensor | None = None) -> Tensor:
        """tokens int64 [B, S] -> logits [B, S, vocab_size], fp32 (fp64 in fp64)."""
        return self.lm_head(self.hidden(tokens, seq_idx))

    def loss(
        self, tokens: Tensor, targets: Tensor, seq_idx: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The summed negative log likelihood (nats, fp32 scalar) of targets, and how many there are (int64 scalar).

        tokens, targets int64 [B, S]; mask None or bool [B, S], False where a target counts nothing. The logits
        of the whole batch never exist at once (`loss.head_loss`).
        """
        hidden = self.hidden(tokens, seq_idx).flatten(0, 1)
        flat_mask = None if mask is None else mask.flatten()
        nll = self.lm_head.loss(hidden, targets.flatten(), flat_mask)
        # A tensor made from a number on the host would be copied, and the device waited for.
        count = mask.sum() if mask is not None else targets.new_full((), targets.numel())
        return nll, count

    def new_cache(self, batch: int, device: torch.device | str | None = None) -> list[dict[str, Tensor]]:
        """Empty decoding state, one dict a block: convolution and SSM states, or keys and values."""
        return [layer.mixer.new_cache(batch, self.compute_dtype, device) for layer in self.layers]

    @torch.no_grad()
    def prefill(self, tokens: Tensor, cache: list[dict[str, Tensor]]) -> Tensor:
        """The first tokens int64 [B, S] at once -> logits after the last [B, vocab_size] fp32; fills the empty cache."""
        x = self.embeddings(tokens).to(self.compute_dtype)
        for layer, state in zip(self.layers, cache, strict=True):
            x = layer.prefill(x, state)
        return self.lm_head(self.norm_f(x[:, -1]))

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: list[dict[str, Tensor]]) -> Tensor:
        """The next tokens int64 [B] of every sequence -> logits [B, vocab_size] fp32; the cache moves on in place."""
        x = self.embeddings(tokens[:, None]).to(self.compute_dtype)
        for layer, state in zip(self.layers, cache, strict=True):
            x = layer.step(x, state)
        return self.lm_head(self.norm_f(x))[:, 0]


def document_numbers(seq_idx: Tensor | None, tokens: Tensor) -> Tensor | None:
    """What `attention.attend` takes as mask for a batch of tokens [B, S]: the numbers themselves."""
    return seq_idx


def join_caches(caches: list[list[dict[str, Tensor]]]) -> list[dict[str, Tensor]]:
    """One decoding state of the batch that these states, possibly after different numbers of tokens, are together."""
    joined = []
    for blocks in zip(*caches, strict=True):
        if "k" in blocks[0]:
            length = max(block["k"].shape[2] for block in blocks)
            blocks = [pad_cache(block, length) for block in blocks]
        joined.append({name: torch.cat([block[name] for block in blocks]) for name in blocks[0]})
    return joined


def _empty(cfg: ModelConfig, device: torch.device | str | None) -> Tensor:
    """Room for one [vocab_size, hidden_size] matrix, without the default initialisation's pass over it."""
    return torch.empty(cfg.vocab_size, cfg.hidden_size, dtype=torch.float32, device=device)
