"""EleutherAI's lm-evaluation-harness on our models: tasks by name, or from local files.

Imported only where the package lm-eval is installed (the extra `eval`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from nvfp4_train.errors import ConfigError
from nvfp4_train.training.inference import TrainedRun
from nvfp4_train.training.scoring import log_likelihoods, write_until

WRITE_BATCH = 16  # texts written together
MAX_NEW_TOKENS = 256  # where a task sets no limit
_TASK_NAME = re.compile(r"^(?:task|group):\s*[\"']?([\w.-]+)", re.MULTILINE)


class HarnessModel(TemplateLM):
    """A trained model as the harness sees one. A document starts with eos, as in training."""

    def __init__(self, run: TrainedRun) -> None:
        super().__init__()
        self.run = run

    @property
    def eot_token_id(self) -> int:
        return self.run.tokenizer.eos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        start = [] if add_special_tokens is False else [self.run.tokenizer.eos_id]
        return start + self.run.tokenizer.encode(string)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Each by itself: our pieces cross word boundaries, so in the tokens of both together a context may not end."""
        return self.tok_encode(context), self.tok_encode(continuation, add_special_tokens=False)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        return log_likelihoods(self.run.model, [(context, tokens) for _, context, tokens in requests])

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log probability of whole texts, in windows of the length that training saw."""
        out = []
        for request in requests:
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = get_rolling_token_windows(tokens, self.eot_token_id, self.run.cfg.training.seq_len, 1)
            pairs = [make_disjoint_window(window) for window in windows]
            out.append(sum(value for value, _ in log_likelihoods(self.run.model, pairs)))
        return out

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        out = []
        for i in range(0, len(requests), WRITE_BATCH):
            batch = requests[i : i + WRITE_BATCH]
            kinds = {str(request.args[1]) for request in batch}
            groups = [batch] if len(kinds) == 1 else [[request] for request in batch]
            for group in groups:
                out += self._write([request.args[0] for request in group], dict(group[0].args[1]))
        return out

    def _write(self, prompts: Sequence[str], options: dict[str, Any]) -> list[str]:
        stops = options.get("until") or []
        return write_until(
            self.run.model,
            self.run.tokenizer,
            [self.tok_encode(prompt) for prompt in prompts],
            [stops] if isinstance(stops, str) else stops,
            int(options.get("max_gen_toks", MAX_NEW_TOKENS)),
            float(options.get("temperature", 0.0)) if options.get("do_sample") else 0.0,
            float(options.get("top_p", 1.0)),
            self.run.cfg.training.seed,
        )


def evaluate_tasks(
    run: TrainedRun, tasks: str, few_shot: int | None, limit: int | None
) -> dict[str, dict[str, Any]]:
    """{task: {metric: value}} of `tasks`: comma-separated names of the harness's tasks, YAML files, or folders of them.

    Where all are files nothing else is looked up. Raises ConfigError for a task that isn't there.
    """
    names, folders, remote = [], [], False
    for word in filter(None, tasks.split(",")):
        path = Path(word).expanduser()
        if path.is_dir() or path.suffix in (".yaml", ".yml"):
            names += _names_in(path)
            folders.append(str(path if path.is_dir() else path.parent))
        else:
            names.append(word)
            remote = True
    manager = TaskManager(include_path=folders or None, include_defaults=remote)
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown or not names:
        raise ConfigError(
            f"tasks={tasks}: {', '.join(unknown) or 'nothing'} is no task of lm-evaluation-harness; give names of its "
            "tasks, or YAML files or folders of your own."
        )
    results = lm_eval.simple_evaluate(
        model=HarnessModel(run),
        tasks=names,
        num_fewshot=few_shot,
        limit=limit,
        task_manager=manager,
        bootstrap_iters=1000,
        log_samples=False,
    )
    return results["results"]


def _names_in(path: Path) -> list[str]:
    files = sorted(path.rglob("*.y*ml")) if path.is_dir() else [path]
    try:
        found = [_TASK_NAME.search(file.read_text(encoding="utf-8")) for file in files]
    except OSError as error:
        raise ConfigError(
            f"tasks={path} can't be read ({error.strerror}): give a task's YAML file."
        ) from error
    return [match[1] for match in found if match]
