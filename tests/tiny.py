"""A model, and a run of it, of a few seconds on one core."""

from nvfp4_train.config.schema import ModelConfig

STEPS = 40
CHECKPOINT_EVERY = 7
TINY_MODEL = [
    "model=quickstart",
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=1",
    "model.head_dim=16",
    "model.mamba_num_heads=2",
    "model.mamba_head_dim=16",
    "model.ssm_state_size=15",  # in_proj is 96 wide
    "model.chunk_size=16",
    "model.vocab_size=384",
    "training.seq_len=32",
]
TINY = [
    *TINY_MODEL,
    "model.pattern=M-*-",
    f"training.max_tokens={STEPS * 8 * 32}",
    "training.global_batch_size=8",
    "training.micro_batch_size=4",
    "training.log_every=1",
    "training.validate_every=15",
    "training.validate_tokens=512",
    "training.sample_tokens=8",
    "training.compile=off",
    "optimizer.lr=2e-3",
    "schedule.warmup_tokens=1024",
    "schedule.decay_every=1024",
    f"checkpoint.every_steps={CHECKPOINT_EVERY}",
]


def every_block() -> ModelConfig:
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
