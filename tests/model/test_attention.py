import pytest
import torch

from nvfp4_train.model import attention
from nvfp4_train.model.attention import Attention


def softmax_attention(q, k, v, seq_idx):
    """One head: q, k, v [S, D]; a token sees itself and those before it in its document."""
    out = []
    for t in range(len(q)):
        seen = [s for s in range(t + 1) if seq_idx[s] == seq_idx[t]]
        weights = (k[seen] @ q[t] / q.shape[1] ** 0.5).exp()
        out.append(weights @ v[seen] / weights.sum())
    return torch.stack(out)


@pytest.fixture(params=["fused", "one block", "four blocks"])
def path(request, monkeypatch):
    if request.param == "fused":
        monkeypatch.setattr(attention, "BLOCKWISE_TOKENS", 0)
    if request.param == "four blocks":
        monkeypatch.setattr(attention, "QUERY_BLOCK", 3)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("seq_idx", [[0] * 10, [0, 0, 0, 1, 2, 2, 2, 2, 2, 3]])
def test_equals_plain_softmax(tiny, kv_heads, seq_idx):
    tiny.num_key_value_heads = kv_heads
    layer = Attention(tiny).double()
    gen = torch.Generator().manual_seed(0)
    for p in layer.parameters():
        p.data = torch.randn(p.shape, generator=gen, dtype=torch.float64) / 4
    x = torch.randn(2, 10, tiny.hidden_size, generator=gen, dtype=torch.float64)

    d, heads = tiny.head_dim, tiny.num_attention_heads
    weight = layer.qkv_proj.weight.view(-1, d, tiny.hidden_size)
    expected = []
    for row in x:
        parts = []
        for h in range(heads):
            kv = h // (heads // kv_heads)
            q, k, v = (row @ weight[i].T for i in (h, heads + kv, heads + kv_heads + kv))
            parts.append(softmax_attention(q, k, v, seq_idx))
        expected.append(torch.cat(parts, dim=1) @ layer.o_proj.weight.T)
    documents = None if len(set(seq_idx)) == 1 else torch.tensor([seq_idx, seq_idx], dtype=torch.int32)
    torch.testing.assert_close(layer(x, documents), torch.stack(expected), rtol=1e-12, atol=1e-12)
