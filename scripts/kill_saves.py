"""Kill one rank of two at every file operation of a save, and watch the next start resume.

    python scripts/kill_saves.py OUT [--rank 0] [--target disk|objects] [--full] [--writes 12] [--like TEXT] [key=value ...]

Each trial trains two ranks from a checkpoint of step 4 to that of step 8, which replaces it
(checkpoint.keep_last=1). In that save the rank is killed at its n-th operation on the folder of
checkpoints (a write is torn in half first), or, with --full, the operation fails as on a full disk. The
next launch must resume, from whichever checkpoint it finds, and reach step 12 with the losses of a run
that nothing disturbed. Prints a line a trial and a table; the exit code is 1 if any launch failed or a
loss differs. Of the thousands of writes to one file `--writes` are tried, spread evenly; with --like, which
may be repeated, only one operation that holds that text.

Target "objects" is a folder behind fsspec (local://), where nothing is renamed, as in an object store; a
kill may leave half an object there, which an object store wouldn't. Ranks are forked, so that torch is
imported once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import fsspec.implementations.local
import matplotlib.figure  # noqa: F401 - what the forked ranks need is imported before
import torch.distributed as dist

from nvfp4_train.cli import exit_code
from nvfp4_train.distributed import fsdp, storage  # noqa: F401
from nvfp4_train.distributed.saving import Saver
from nvfp4_train.pretrain import main as pretrain
from nvfp4_train.training import run  # noqa: F401
from nvfp4_train.training.metrics import read_metrics

RANKS, OLDER, NEWER, END = 2, 4, 8, 12
_PATH_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link")
Operation = Callable[..., object]  # of the operation's name and, for a write, what writes half of it


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--target", choices=("disk", "objects"), default="disk")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--writes", type=int, default=12)
    parser.add_argument("--like", action="append")
    args, words = parser.parse_known_args()
    out = args.out.absolute()
    words += [f"checkpoint.every_steps={OLDER}", "checkpoint.keep_last=1", "training.log_every=1"]
    words += ["training.validate_every=0", "training.sample_tokens=0", "device=cpu"]

    place = "objects" if args.target == "objects" else "checkpoints"

    def train(name: str, steps: int, harm: Callable[[], None] | None = None) -> list[int]:
        folder = out / name
        where = [f"checkpoint.dir=local://{folder}/{place}"] if args.target == "objects" else []
        return launch(
            [*words, *where, f"training.max_steps={steps}", f"run_dir={folder}"], args.rank, harm, out / "log"
        )

    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    listed = train(
        "undisturbed", END, lambda: inject(out / "undisturbed" / place, listing(out / "operations"))
    )
    if any([*listed, *train("trial", OLDER)]):
        raise SystemExit(f"a run that nothing disturbed failed: see {out}/log")
    (out / "trial").rename(out / "begun")
    expected = losses_of(out / "undisturbed")
    operations = (out / "operations").read_text().splitlines()
    chosen = thinned(operations, args.writes)
    if args.like:
        chosen = [
            n for text in args.like for n in spread([n for n in chosen if text in operations[n - 1]], 1)
        ]

    outcomes: Counter[tuple[int, bool]] = Counter()
    good = True
    for n in chosen:
        begin(out)
        start = time.monotonic()
        struck = train("trial", NEWER, lambda n=n: inject(out / "trial" / place, harming(n, args.full)))
        resumed = train("trial", END)
        events = [
            r["step"] for r in read_metrics(out / "trial" / "metrics.jsonl") if r.get("event") == "resume"
        ]
        came, equal = events[-1] if events else 0, losses_of(out / "trial") == expected
        warned = "is passed over" in (out / "trial" / "console.log").read_text()
        hit = struck[args.rank] not in (0, None) if args.full else struck[args.rank] == -signal.SIGKILL
        as_meant = resumed == [0] * RANKS and equal and came in (OLDER, NEWER)
        # The second launch made the first one's mistakes good, and nothing of them is left.
        left = sorted(os.listdir(out / "trial" / place))
        good &= as_meant and left == [f"step_{END:08d}"]
        outcomes[came, warned] += 1
        print(
            f"{n:>4} {operations[n - 1]:<44} exit codes {struck}{'' if hit else ' (not harmed)'}, resumed from {came}, "
            f"losses {'equal' if equal else 'DIFFER'}{', a damaged one passed over' * warned}, left: {', '.join(left)}; "
            f"{time.monotonic() - start:.1f} s",
            flush=True,
        )
    print(
        "\n| target | rank | operations | resumed from the older one | from the new one | a damaged one passed over |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    older, newer = (sum(n for (came, _), n in outcomes.items() if came == step) for step in (OLDER, NEWER))
    passed = sum(n for (_, warned), n in outcomes.items() if warned)
    print(
        f"| {args.target} | {args.rank} | {len(chosen)} of {len(operations)} | {older} | {newer} | {passed} |"
    )
    print(
        "every launch resumed with the undisturbed losses" if good else "NOT every launch went as it should"
    )
    return 0 if good else 1


def thinned(operations: list[str], writes: int) -> list[int]:
    """Numbers (from 1) of the operations to try: all, but of equal ones in a row no more than `writes`."""
    rows = groupby(enumerate(operations, 1), key=lambda numbered: numbered[1])
    return [i for _, row in rows for i in spread([number for number, _ in row], writes)]


def spread(items: list[int], n: int) -> list[int]:
    """`n` of them, or all."""
    return items if len(items) <= n else [items[(2 * i + 1) * len(items) // (2 * n)] for i in range(n)]


def begin(out: Path) -> None:
    """The trial's folder as it was after the older checkpoint."""
    shutil.rmtree(out / "trial", ignore_errors=True)
    shutil.copytree(out / "begun", out / "trial")


def losses_of(folder: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_metrics(folder / "metrics.jsonl") if "event" not in r}


def launch(words: list[str], victim: int, harm: Callable[[], None] | None, log: Path) -> list[int]:
    """The ranks' exit codes (negative: signals). When one has ended badly the others are stopped, as torchrun does it."""
    server, port = serve_store()
    ranks = []
    for rank in range(RANKS):
        if (pid := os.fork()) == 0:
            os.environ |= {
                "RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(RANKS),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
            to = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(to, 1)
            os.dup2(to, 2)
            if harm and rank == victim:
                harm()
            sys.argv = ["pretrain", *words]
            os._exit(exit_code(pretrain))
        ranks.append(pid)
    codes: dict[int, int] = {}
    deadline = None
    while len(codes) < RANKS:
        for pid in set(ranks) - codes.keys():
            if (ended := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(ended[1])
        if deadline is None and any(codes.values()):
            deadline = time.monotonic() + 10
            for pid in set(ranks) - codes.keys():
                os.kill(pid, signal.SIGTERM)
        if deadline and time.monotonic() > deadline:
            for pid in set(ranks) - codes.keys():
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
    return [codes[pid] for pid in ranks]


def serve_store() -> tuple[int, int]:
    """(process, port) of a store for the ranks: it has threads, and a forking process shouldn't."""
    got, to = os.pipe()
    if (server := os.fork()) == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(to, str(store.port).encode())
        signal.pause()
    port = int(os.read(got, 100))
    os.close(got)
    os.close(to)
    return server, port


def inject(folder: Path, operation: Operation) -> None:
    """Call `operation` before each file operation under `folder` of the save of the newer checkpoint, with what it is."""
    saving = False
    objects = fsspec.implementations.local.LocalFileOpener
    stream = storage.HashingStream
    save, fsync, writes = Saver._run, os.fsync, {cls: cls.write for cls in (stream, objects)}

    def within(self: Saver, job) -> None:
        nonlocal saving
        saving = job.step == NEWER
        save(self, job)
        saving = False

    def audit(event: str, args: tuple) -> None:
        if not saving or event not in _PATH_EVENTS:
            return
        paths = [os.fsdecode(a) for a in args if isinstance(a, str | bytes | os.PathLike)]
        # shutil.rmtree names files relative to an open folder.
        if event in ("os.remove", "os.rmdir") or any(p.startswith(str(folder)) for p in paths):
            operation(f"{event} {' -> '.join(os.path.basename(p) for p in paths)}")

    def torn(cls: type) -> Callable:
        def write(self, data):
            outer = cls is objects or isinstance(self._raw, objects)
            if saving and not (cls is stream and outer):
                half = lambda: (writes[cls](self, bytes(data)[: len(data) // 2]), self.flush())  # noqa: E731
                operation("write", half)
            return writes[cls](self, data)

        return write

    def synced(fd: int) -> None:
        if saving:
            operation("fsync")
        fsync(fd)

    sys.addaudithook(audit)
    Saver._run, os.fsync = within, synced
    for cls in writes:
        cls.write = torn(cls)


def listing(path: Path) -> Operation:
    """Writes down each operation, a line each."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    return lambda name, half=None: os.write(fd, f"{name}\n".encode())


def harming(n: int, full: bool) -> Operation:
    """Ends this process at the n-th operation, or lets that one fail."""
    count = 0

    def operation(name: str, half: Callable[[], None] | None = None) -> None:
        nonlocal count
        count += 1
        if count != n:
            return
        if full:
            raise OSError(28, f"No space left on device ({name})")
        if half:
            half()
        os.kill(os.getpid(), signal.SIGKILL)

    return operation


if __name__ == "__main__":
    sys.exit(main())
