"""The typed configuration. Every key a user can set is a field here, with its unit.

Hydra composes YAML from `configs/` over these dataclasses: a misspelt key or a wrong type stops at once.
Values that depend on each other are checked in `nvfp4_train.config.validate`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING


@dataclass
class ModelConfig:
    """Architecture of the hybrid stack; names follow the Hugging Face configuration of Nemotron-H."""

    name: str = ""
    pattern: str = MISSING  # one letter a block: M Mamba-2, * attention, - MLP
    hidden_size: int = MISSING
    intermediate_size: int = MISSING  # width of the squared-ReLU MLP
    num_attention_heads: int = MISSING
    num_key_value_heads: int = MISSING
    head_dim: int = MISSING
    mamba_num_heads: int = MISSING
    mamba_head_dim: int = MISSING
    n_groups: int = MISSING  # groups of Mamba-2's B and C, and of its gated norm
    ssm_state_size: int = MISSING
    conv_kernel: int = 4
    chunk_size: int = 128  # tokens a chunk of the SSD scan
    vocab_size: int = MISSING
    norm_eps: float = 1e-5
    init_std: float | None = None  # null: sqrt(0.8 / hidden_size)


@dataclass
class RuleConfig:
    """What runs in which format. The last rule that matches an operand decides."""

    modules: str = "*"  # glob on the module's name, such as "*.out_proj"
    blocks: str = "all"  # all | first:N | last:N | N | N-M (inclusive)
    operands: list[str] = field(default_factory=lambda: ["*"])  # globs: fprop.input, *.weight, wgrad.*, ...
    phase: str = "*"  # glob on the phase's name
    format: str = MISSING  # nvfp4 | mxfp4 | fp8 | bf16


@dataclass
class PhaseConfig:
    """A part of training, from `start` (share of max_tokens) until the next phase starts."""

    name: str = MISSING
    start: float = MISSING


@dataclass
class PrecisionConfig:
    """The recipe: formats of the three GEMMs' six operands, block by block, phase by phase."""

    name: str = MISSING  # nvfp4 | mxfp4 | fp8 | bf16 | fp32
    backend: str = "auto"  # GEMM: auto | emulated | triton | cublas | te
    te_recipe: str = (
        "block"  # fp8 by Transformer Engine: block (1x128, 128x128) | current | delayed (a scale a tensor)
    )
    first_blocks_bf16: int | None = None  # null: round(2 L / 62), the paper's 2 of 62
    last_blocks_bf16: int | None = None  # null: max(1, round(8 L / 62)), the paper's 8 of 62
    stochastic_gradients: bool = True  # stochastic rounding of both gradient operands
    hardware_rounding: bool = (
        False  # nvfp4, native on sm_100 and sm_103: stochastic by cvt.rs, if it proves equal at start
    )
    hadamard: bool = True  # 16-point random Hadamard transform on both wgrad operands
    weight_blocks_2d: bool = True  # 16x16 weight blocks (else 1x16 along each GEMM's inner dimension)
    four_over_six: str = (
        "none"  # nvfp4: none | weights | activations | all: forward blocks scaled to 6 or to 4 (2512.02010)
    )
    backward: str = "standard"  # nvfp4: standard | ms_eden (Quartet II, 2601.22813)
    rules: list[RuleConfig] = field(default_factory=list)  # after the defaults, so they win
    phases: list[PhaseConfig] = field(default_factory=list)  # empty: one phase named "main"
    health_every: int = 400  # steps between measurements of what quantization loses, layer by layer; 0: never


@dataclass
class MixturePhaseConfig:
    """How the corpora are mixed, from `start` (share of max_tokens) until the next phase starts."""

    weights: dict[str, float] = MISSING  # {name in data.corpora: share of the tokens, up to a common factor}
    start: float = 0.0


HELD_OUT = "heldout"  # name of the data set that data.source gives


@dataclass
class DataConfig:
    """Text and what becomes of it; of a prepared data set only the keys from `packing` on matter."""

    # "stdlib", a file, folder, glob or URL of text, "hf:NAME" (Hugging Face), or a prepared data set
    source: str = "stdlib"
    text_key: str = "text"  # field (.jsonl) or column (.parquet, Hugging Face) that holds the text
    drop_duplicates: bool = False  # of equal documents keep the first (stdlib: always)
    hf_config: str | None = (
        None  # hf: sources: configuration, split, revision, and whether to read while it downloads
    )
    hf_split: str = "train"
    hf_revision: str | None = None
    hf_streaming: bool = True
    # a SentencePiece .model or a byte-level tokenizer.json; null: a SentencePiece model trained on the training part
    tokenizer: str | None = None
    cache_dir: str | None = None  # prepared data; null: $XDG_CACHE_HOME/nvfp4_train
    valid_fraction: float = 0.02  # share of documents held out, by hash
    max_train_bytes: int | None = None  # of text, at most (documents chosen by hash)
    # Instead of `source`: {name: source}; each held-out part is validated as valid/NAME, `mixture` says what is trained on.
    corpora: dict[str, str] = field(default_factory=dict)
    mixture: list[MixturePhaseConfig] = field(default_factory=list)
    packing: str = (
        "stream"  # stream: the text in one piece, cut into sequences; documents: whole ones where they fit
    )
    reset_state_at_documents: bool = False  # Mamba state, convolution and attention restart at documents
    workers: int = 1  # threads that read ahead; 0: the training step reads


@dataclass
class PrepareConfig:
    """`python -m nvfp4_train.prepare`: a data set in a folder of one's own."""

    data: DataConfig = field(default_factory=DataConfig)
    out: str = MISSING  # the prepared data set's folder
    vocab_size: int | None = None  # null: that of data.tokenizer, 4096 without one
    action: str = (
        "build"  # build | merge (of all parts) | verify (every byte of out against its checksums) | stats
    )
    part: str | None = None  # "3/64": encode this share only, for example on one of 64 machines; then merge
    workers: int | None = None  # processes that encode; null: one a core


@dataclass
class OptimizerConfig:
    name: str = "adamw"
    lr: float = MISSING  # base learning rate; the schedule multiplies it
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.1  # not on 1-D parameters


@dataclass
class ScheduleConfig:
    """Learning rate over the run; lengths in tokens. The formulas: docs/recipes.md."""

    name: str = MISSING  # staged | wsd | cosine
    warmup_tokens: float = MISSING
    boost: float = 1.35  # staged: peak = lr x boost (1.2 to 1.5)
    decay_factor: float = 0.85  # staged: every decay_every tokens
    decay_every: float = 50e9
    floor: float = 0.01  # staged: share of the peak under which the stages do not go
    anneal_start: float = 0.8  # staged: share of the run; wsd: 1 - this is the decay's share
    final_lr: float = 0.01  # rate at the end, as share of the peak (wsd and cosine: of lr)
    decay_shape: str = "linear"  # wsd: linear | cosine | minus_sqrt


@dataclass
class ClippingConfig:
    name: str = MISSING  # adaptive | fixed | zclip | adagc
    baseline: float = 1.0  # the BF16 run's threshold
    initial_ratio: float = 0.65  # adaptive: threshold starts at initial_ratio x baseline
    raise_after: int = 100  # adaptive: consecutive clipped steps ...
    raise_factor: float = 1.05  # ... that raise the threshold
    target_ratio: float = 0.8  # where the average of norm / threshold should sit
    tolerance: float = 0.3  # a warning when it stays further off than this ...
    warn_after: int = 200  # ... for so many steps
    average_steps: int = 100
    zclip_z: float = 2.5  # zclip: deviations above the average from which a norm is pulled back
    zclip_alpha: float = 0.97  # zclip: weight of the past in average and variance
    zclip_warmup: int = 25  # zclip: steps under the baseline alone, which start them
    adagc_ratio: float = 1.05  # adagc: a tensor's gradient, at most so many times its average norm
    adagc_beta: float = 0.98  # adagc: weight of the past in that average
    adagc_warmup: int = 100  # adagc: steps of global clipping to the baseline


@dataclass
class RecoveryConfig:
    """What happens when loss or gradients go wrong: docs/recipes.md. Steps are optimizer steps."""

    name: str = MISSING  # auto | skip_nonfinite | off
    max_consecutive_skips: int = 50  # skip_nonfinite: then stop with exit code 76
    # Detection
    window: int = (
        100  # accepted steps that a step is compared with; nothing stands out until there are so many
    )
    sigmas: float = 3.0  # standard deviations above their average that make an exceedance ...
    skip_sigmas: float = 20.0  # ... and those of the loss from which the step's update is skipped (auto)
    skip_norm: float = 20.0  # a gradient norm so many times its (geometric) average is skipped too
    loss_floor: float = 0.005  # least standard deviation of the loss, as share of its average
    norm_floor: float = 0.2  # least standard deviation of the gradient norm's logarithm
    confirm: int = 5  # exceedances ...
    confirm_within: int = 10  # ... among so many steps that are a spike
    slow_window: int = 500  # steps of the long average of the loss ...
    slow_rise: float = 0.03  # ... and the share by which it may rise above its lowest
    health_jump: float = 0.1  # rise of a layer's underflow or saturation that is an alarm
    # Recovery (auto)
    snapshot_every: int = 200  # steps between copies of the state to host memory
    snapshots: int = 2  # copies kept
    skip_margin: int = 10  # batches stepped over before the onset of a spike, and after it was found
    max_rollbacks: int = 3  # in one stretch of trouble; then stop with exit code 76
    forget_after: int = 1000  # steps without a spike after which trouble counts as over
    careful_steps: int = 200  # second rewind and later: steps with ...
    careful_lr: float = 0.5  # ... the learning rate times this, and ...
    careful_bf16: str = (
        "all"  # ... these layers in BF16: all | worst:N (by their signal-to-noise ratio) | none
    )
    read_retries: int = 3  # times that a batch which cannot be read is tried again, after 1, 2, 4 ... seconds
    hang_seconds: float | None = (
        1800.0  # a step that takes longer (auto): stop with exit code 76; null: wait forever
    )


@dataclass
class FaultConfig:
    """A fault to rehearse recovery with."""

    kind: str = (
        MISSING  # repeated_tokens | random_tokens | gradient | nan | bit_flip | lr | read_error | stuck
    )
    step: int = MISSING  # the first step (from 1) that it strikes; of data faults: the first batch
    steps: int = 1  # so many steps or batches from there
    rank: int | None = None  # null: all ranks (bit_flip, nan, stuck: rank 0)
    factor: float = 1e3  # gradient: of the gradients; lr: of the learning rate
    tensor: str = "*"  # bit_flip: glob on the parameter's name; its first match is hit
    bit: int = 30  # bit_flip: of the fp32 weight; 30 is the exponent's highest
    repeat: bool = False  # strikes again when the run has rewound and comes by once more


@dataclass
class ParallelConfig:
    """How processes share the run; sizes are numbers of ranks."""

    fsdp: int | None = None  # ranks that hold one shard each; null: all there are, over `replicate`
    replicate: int = 1  # groups of `fsdp` ranks that hold the same shards (HSDP)
    tensor: int = 1  # 1 alone so far
    context: int = 1  # 1 alone so far
    weight_gather: str = "bf16"  # what quantized weights travel as: bf16 | nvfp4
    grad_reduce: str = "fp32"  # what their gradients travel as: fp32 | bf16 | fp8 | nvfp4


@dataclass
class CheckpointConfig:
    every_steps: int = MISSING
    keep_last: int = 2
    keep_every: int | None = None  # steps; such checkpoints are never deleted
    dir: str | None = (
        None  # null: run_dir/checkpoints; a folder, or an fsspec URL (s3://...), that all ranks reach
    )


@dataclass
class LoggingConfig:
    wandb: str = "off"  # off | offline | online
    wandb_project: str = "nvfp4_train"
    tensorboard: bool = False
    console: str = "auto"  # auto | bar | lines
    peak_tflops: float | None = (
        None  # what mfu is a share of; null: the device's dense BF16 peak, where known
    )


@dataclass
class TrainingConfig:
    max_tokens: float = MISSING  # the budget; the run ends at the first step that reaches it
    max_steps: int | None = None  # an earlier end, for trials; the schedule still follows max_tokens
    seq_len: int = MISSING
    global_batch_size: int = MISSING  # sequences a step
    micro_batch_size: int = MISSING  # sequences a forward pass
    seed: int = 1234
    log_every: int = 10  # steps between reads of the device's metrics
    validate_every: int = 0  # steps; 0: only at the end
    validate_bf16: bool = False  # also report the validation loss with all layers in BF16
    validate_tokens: float | None = None  # null: every held-out token
    compile: str = "auto"  # auto | on | off: torch.compile of each block
    kernels: str = "auto"  # auto: ours in Triton, on GPUs | torch: the reference | mamba_ssm: the scan of the extra `mamba`
    deterministic: bool = (
        True  # on GPUs: attention whose gradients have the same bits every time; false: the fastest
    )
    recompute: str = "none"  # in the backward pass: none | squared_relu | block | budget (model/recompute.py)
    recompute_budget: float = 0.5  # budget: share of the activations that torch.compile may keep
    sample_prompt: str = ""  # the text sample at the end continues this
    sample_tokens: int = 128


@dataclass
class Config:
    """One run."""

    run_dir: str = MISSING
    dry_run: bool = False
    init_from: str | None = (
        None  # a run, a checkpoint of one, or a Hugging Face model, whose weights this run starts from
    )
    device: str = "auto"  # auto | cpu | cuda
    model: ModelConfig = field(default_factory=ModelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    clipping: ClippingConfig = field(default_factory=ClippingConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    experiment: str = ""
    faults: list[FaultConfig] = field(default_factory=list)
