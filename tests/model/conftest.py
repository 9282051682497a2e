from __future__ import annotations

import pytest

from nvfp4_train.config.schema import ModelConfig


@pytest.fixture
def tiny() -> ModelConfig:
    """Every kind of block, several groups and query heads a key-value head, several chunks a sequence."""
    return ModelConfig(
        pattern="M-*M-",
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        mamba_num_heads=6,
        mamba_head_dim=8,
        n_groups=2,
        ssm_state_size=5,
        chunk_size=8,
        vocab_size=97,
    )
