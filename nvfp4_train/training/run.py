"""One launch of a run: builds its parts from the configuration, starts or resumes, and tells how it ended."""

from __future__ import annotations

import dataclasses
import gc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nvfp4_train import units
from nvfp4_train.config.layout import layout_of, world_size
from nvfp4_train.config.schema import Config, LoggingConfig
from nvfp4_train.data.corpora import Corpora, open_corpora, prepare_corpora
from nvfp4_train.data.mixture import describe, to_json
from nvfp4_train.distributed.agreement import LaggedMax, control_group, from_first
from nvfp4_train.distributed.failures import NoPeers, PeerWatch
from nvfp4_train.distributed.processes import Processes
from nvfp4_train.distributed.processes import start as start_processes
from nvfp4_train.distributed.saving import Saver
from nvfp4_train.errors import ConfigError, StoppedBySignal
from nvfp4_train.model.flops import flops_per_token, parameter_count
from nvfp4_train.model.hybrid import HybridModel
from nvfp4_train.model.init import fill_, initialize_
from nvfp4_train.model.kernels import choose_kernels
from nvfp4_train.model.recompute import apply_recompute
from nvfp4_train.precision import apply_recipe
from nvfp4_train.training import init_from, machine, peaks, resume
from nvfp4_train.training.clipping import build_clipper
from nvfp4_train.training.compilation import compile_blocks
from nvfp4_train.training.console import Console
from nvfp4_train.training.detection import SpikeDetector
from nvfp4_train.training.finite import SkipCounter
from nvfp4_train.training.inference import save_tokenizer
from nvfp4_train.training.memory import compute_dtype
from nvfp4_train.training.metrics import MetricsWriter, read_metrics
from nvfp4_train.training.optimizer import build_optimizer
from nvfp4_train.training.plots import plot_run
from nvfp4_train.training.recovery import Recovery
from nvfp4_train.training.resume import Start
from nvfp4_train.training.rewinding import write_missing_events
from nvfp4_train.training.run_folder import RunFolder, checkpoints_of
from nvfp4_train.training.sampling import sample_text
from nvfp4_train.training.schedule import build_schedule
from nvfp4_train.training.signals import StopRequest
from nvfp4_train.training.state import TrainState
from nvfp4_train.training.summary import final_summary, more_tokens_command
from nvfp4_train.training.tracker import build_tracker
from nvfp4_train.training.trainer import Trainer

if TYPE_CHECKING:  # FSDP2 takes a second to import, which a process alone doesn't need
    from nvfp4_train.distributed.fsdp import ShardedModel

SAMPLE_TEMPERATURE, SAMPLE_TOP_P = 0.8, 0.95
_LAST_STEPS = 20  # over which the summary averages the training loss


def run(cfg: Config, overrides: Sequence[str]) -> None:
    """Train as `cfg` says, from the start or from what its run folder holds. `overrides`: the command line's words.

    Raises UserError: bad data or folder (exit code 2), stopped by a signal (75), recovery gave up (76), full disk (1).
    """
    with StopRequest() as stop:
        device = machine.resolve_device(cfg.device)
        failures = Path(cfg.run_dir).expanduser().absolute() / "failures"
        processes = start_processes(device, layout_of(cfg, world_size()), failures)
        folder = _open_folder(cfg, processes)
        with open(os.devnull, "w") as nowhere:
            if processes.first:
                console = Console(folder.console_log, cfg.logging.console)
            else:
                console = Console(None, "lines", nowhere)
            peers = PeerWatch(failures, console.warning) if processes.size > 1 else NoPeers()
            stop.last_words = peers.stop_all
            try:
                _launch(cfg, overrides, folder, console, stop, processes, device, peers)
            except StoppedBySignal:
                raise
            except Exception as error:
                if (told := peers.explain(error)) is error:
                    raise
                raise told from error
            except BaseException:  # a signal before there was anything to save
                peers.stop_all()
                raise
            finally:
                peers.close()
                console.close()
                folder.close()
        processes.stop()


def _open_folder(cfg: Config, processes: Processes) -> RunFolder:
    """The run folder, resolved and held by the first rank."""
    held = []

    def hold() -> tuple[Path, str]:
        held.append(RunFolder(cfg.run_dir, cfg.checkpoint.dir))
        return held[0].path, held[0].run_id

    path, run_id = from_first(processes.control, hold)
    return held[0] if held else RunFolder.held_by_first(path, run_id, cfg.checkpoint.dir)


def _launch(
    cfg: Config,
    overrides: Sequence[str],
    folder: RunFolder,
    console: Console,
    stop: StopRequest,
    processes: Processes,
    device: torch.device,
    peers: NoPeers,
) -> None:
    if device.type == "cpu":
        machine.keep_freed_memory()
    start = resume.begin(folder, cfg, console.warning, processes.control)
    if start.finished:
        tokens = start.checkpoint.tokens
        console.info(
            f"{folder.path} is finished (step {start.checkpoint.step}, {units.count(tokens)} tokens).\n"
            f"Train longer:  {more_tokens_command(overrides, 2 * tokens)}"
        )
        return
    # The first rank prepares; the others find the result, or make their own where they don't share its disk.
    prepared = from_first(processes.control, lambda: prepare_corpora(cfg, console.info))
    if not processes.first:
        prepared = prepare_corpora(cfg, console.info)
    corpora = open_corpora(cfg, prepared, *start.data)
    if processes.first:
        save_tokenizer(folder.path, corpora.tokenizer)

    model, sharded = _build_model(cfg, processes, device)
    state = TrainState(
        model,
        build_optimizer(model, cfg.optimizer),
        build_clipper(cfg.clipping, device, sum(1 for _ in model.parameters())),
        SpikeDetector(cfg.recovery, device),
        SkipCounter(device),
        Recovery(cfg.recovery, start.history),
        cfg.training.seed,
        corpora,
    )
    if start.checkpoint is None and cfg.init_from is not None:
        fill_(model, init_from.weight_source(cfg, corpora.tokenizer, console.warning))
    elif start.checkpoint is None:
        initialize_(model, cfg.training.seed)
    else:
        state.restore(start.checkpoint)
    precision = apply_recipe(
        model,
        cfg.precision,
        len(cfg.model.pattern),
        cfg.training.seed,
        sharded.prepare_weights if sharded else None,
    )
    if sharded:
        sharded.follow(precision.counters[0])
    state.take_precision(precision.state(), start.checkpoint)
    precision.set_phase(state.tokens / cfg.training.max_tokens)
    kernels = choose_kernels(model, cfg.training.kernels, device, cfg.training.deterministic)
    recomputed = apply_recompute(model, cfg.training.recompute, cfg.training.recompute_budget)
    # Transformer Engine's layers stand between the compiled parts.
    compiled = compile_blocks(model, cfg.training.compile, device, whole=precision.backend != "te")
    if cfg.training.recompute == "budget" and compiled.startswith("off"):
        raise ConfigError(
            f"training.recompute=budget needs the compiler ({compiled}): use training.recompute=block."
        )
    choices = [
        ("precision", precision.summary()),
        ("kernels", kernels),
        ("compile", compiled),
        ("recomputes", recomputed),
    ]
    if sharded:
        choices.insert(0, ("ranks", layout_of(cfg, processes.size).describe(cfg)))
    _tell(cfg, console, folder, corpora, start, device, choices)
    resumed_at = start.checkpoint.step if start.checkpoint else None
    logging = cfg.logging if processes.first else LoggingConfig()
    tracker = build_tracker(
        logging, folder.run_id, folder.path, dataclasses.asdict(cfg), resumed_at, console.warning
    )
    saving = control_group()
    peers.wait_for_disks = (saving, processes.control)  # a rewind has checkpoints checked over the latter
    saver = Saver(folder.checkpoints, cfg.checkpoint.keep_last, cfg.checkpoint.keep_every, saving)
    if device.type == "cuda":
        saver.allocate(state.tensors())
    with MetricsWriter(folder.metrics if processes.first else None) as writer:
        if start.checkpoint is not None:
            writer.event("resume", step=state.step, tokens=state.tokens, changed=start.changed)
        if cfg.data.mixture:
            writer.event("mixture", step=state.step, segments=to_json(corpora.segments))
        write_missing_events(writer, state.recovery.history)
        trainer = Trainer(
            cfg,
            folder,
            state,
            precision,
            build_schedule(cfg.schedule, cfg.optimizer.lr, cfg.training.max_tokens),
            corpora,
            writer,
            console,
            tracker,
            device,
            saver,
            LaggedMax(control_group()),
            processes,
            peers,
        )
        # What is there by now stays to the end: the garbage collector need not look through it again and again.
        gc.collect()
        gc.freeze()
        try:
            trainer.train(stop)
        finally:
            gc.unfreeze()  # what is never collected, Triton 3.9 lists on the screen as leaks when Python ends
            if processes.first:
                _plot(cfg, folder, corpora, console)
            tracker.finish()
    sample = _sample(cfg, trainer, device)
    if processes.first:
        console.info("\n" + _summary(cfg, overrides, folder, trainer, sample))
        folder.finish(state.step)


def _build_model(
    cfg: Config, processes: Processes, device: torch.device
) -> tuple[HybridModel, ShardedModel | None]:
    """The model without values, whole or in shards."""
    if processes.mesh is None:
        return HybridModel(cfg.model, device, compute_dtype(cfg)), None
    from nvfp4_train.distributed.fsdp import ShardedModel

    model = HybridModel(cfg.model, "meta", compute_dtype(cfg))
    return model, ShardedModel(model, processes, cfg, device)


def _tell(
    cfg: Config,
    console: Console,
    folder: RunFolder,
    corpora: Corpora,
    start: Start,
    device: torch.device,
    choices: list[tuple[str, str]],
) -> None:
    training, steps = cfg.training, resume.total_steps(cfg.training)
    step_tokens = training.global_batch_size * training.seq_len
    flops = flops_per_token(cfg.model, training.seq_len)
    epochs = {name: f" ({corpora.epochs(name, steps, step_tokens):.2f} epochs)" for name in corpora.datasets}
    often = "".join(epochs.values()) if corpora.only else ""
    rows = [
        ("run", f"{folder.path} (id {folder.run_id})"),
        ("device", machine.describe(device)),
        ("model", f"{cfg.model.name} {cfg.model.pattern}: {parameter_count(cfg.model):,} parameters"),
        ("arithmetic", f"{flops / 1e9:.4g} GFLOP a token, forward and backward"),
        ("MFU", peaks.peak(device, cfg.logging.peak_tflops)[1]),
        *choices,
        ("data", _data(corpora, epochs)),
        (
            "budget",
            f"{units.count(steps * step_tokens)} tokens{often} in {steps} steps of {units.count(step_tokens)}",
        ),
    ]
    if cfg.init_from is not None:
        rows.append(("weights from", cfg.init_from))
    if start.checkpoint is not None:
        rows.append(
            ("resumes", f"at step {start.checkpoint.step} ({units.count(start.checkpoint.tokens)} tokens)")
        )
    rows += [("changed", f"{key}: {was!r} -> {now!r}") for key, (was, now) in start.changed.items()]
    console.header(cfg.experiment, rows)


def _data(corpora: Corpora, epochs: dict[str, str]) -> str:
    """The data set; of several a line for each, and one for each mixture of them."""
    lines = []
    for name, dataset in corpora.datasets.items():
        head, often = (dataset.manifest["source"], "") if corpora.only else (name, epochs[name])
        lines.append(
            f"{head}: {units.count(dataset.n_tokens('train'))} tokens to train on{often}, "
            f"{units.count(dataset.n_tokens('valid'))} held out ({units.size(dataset.n_bytes('valid'))} of text)"
        )
    if not corpora.only:
        lines += [f"from step {segment.start}: {describe(segment.shares)}" for segment in corpora.segments]
    return "\n".join(lines)


def _plot(cfg: Config, folder: RunFolder, corpora: Corpora, console: Console) -> None:
    """A picture that fails must not fail the run."""
    try:
        plot_run(
            folder.metrics,
            _plot_path(folder),
            corpora.baselines(),
            f"{cfg.experiment} ({cfg.precision.name})",
        )
    except Exception as error:
        console.warning(f"the plot could not be drawn ({error})")


def _plot_path(folder: RunFolder) -> Path:
    return folder.plots / "training.png"


def _sample(cfg: Config, trainer: Trainer, device: torch.device) -> str:
    """Text from the model; a sharded one computes on all ranks at once, which choose the same tokens."""
    if not cfg.training.sample_tokens:
        return ""
    return sample_text(
        trainer.state.model,
        trainer.corpora.tokenizer,
        cfg.training.sample_prompt,
        cfg.training.sample_tokens,
        SAMPLE_TEMPERATURE,
        SAMPLE_TOP_P,
        cfg.training.seed,
        device,
    )


def _summary(cfg: Config, overrides: Sequence[str], folder: RunFolder, trainer: Trainer, sample: str) -> str:
    state, prompt = trainer.state, cfg.training.sample_prompt
    records = [record for record in read_metrics(folder.metrics) if "loss" in record]
    losses = [record["loss"] for record in records if not record["skipped"]][-_LAST_STEPS:]
    last = records[-1]
    held_out = {
        name: {key: last.get(f"valid/{name}/{key}") for key in ("loss", "bits_per_byte", "loss_bf16")}
        for name in trainer.corpora.datasets
        if f"valid/{name}/loss" in last
    }
    whole = cfg.training.validate_tokens is None
    shown = Path(cfg.run_dir)
    return final_summary(
        run_dir=shown,
        steps=state.step,
        tokens=state.tokens,
        launch_tokens=trainer.launch_tokens,
        launch_seconds=trainer.seconds,
        loss=sum(losses) / max(1, len(losses)),
        precision=trainer.precision.summary(),
        checkpoint=f"{checkpoints_of(shown, cfg.checkpoint.dir)}/step_{state.step:08d}",
        plot=shown / _plot_path(folder).relative_to(folder.path),
        held_out=held_out,
        baselines=trainer.corpora.baselines() if whole else None,
        skipped=int(state.skips.total),
        prompt=prompt,
        sample=sample,
        more_command=more_tokens_command(overrides, 2 * state.tokens),
    )
