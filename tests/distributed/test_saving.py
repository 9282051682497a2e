"""Saves behind the training loop, and saves that are killed or refused by the disk at every one of their operations."""

from __future__ import annotations

import threading

import pytest
import torch

from nvfp4_train.distributed import checkpoint
from nvfp4_train.distributed.saving import Saver, save
from nvfp4_train.distributed.storage import HashingStream, Storage
from nvfp4_train.errors import SaveError
from tests.child import results_of


def state(value: float) -> dict:
    return {"model": {"a": torch.full((300,), value)}}


def value_of(found: checkpoint.Checkpoint) -> float:
    """The one value that every tensor of a whole checkpoint holds."""
    loaded = state(0.0)
    checkpoint.load(found, loaded)
    values = torch.cat([t.flatten().float() for t in loaded["model"].values()]).unique()
    assert len(values) == 1
    return float(values)


@pytest.fixture
def gate(monkeypatch) -> threading.Event:
    """Writing to disk waits for this."""
    opened, write = threading.Event(), HashingStream.write

    def gated(self, data):
        assert opened.wait(60)
        return write(self, data)

    monkeypatch.setattr(HashingStream, "write", gated)
    return opened


def test_the_loop_goes_on_while_the_state_of_that_moment_is_written(tmp_path, gate):
    saver, tensors = Saver(tmp_path), state(1.0)
    saver.save(1, 10, tensors, {"x": 1})
    for tensor in tensors["model"].values():
        tensor.fill_(2.0)  # the next step
    assert checkpoint.newest(tmp_path, pytest.fail) is None
    assert saver.finished() == []
    gate.set()
    saver.wait()
    found = checkpoint.newest(tmp_path, pytest.fail)
    assert (found.step, found.tokens, found.values) == (1, 10, {"x": 1})
    assert value_of(found) == 1.0
    (saved,) = saver.finished()
    assert saved.step == 1
    assert 0 < saved.waited_seconds <= saved.seconds
    assert saved.bytes == sum(p.stat().st_size for p in (tmp_path / "step_00000001").iterdir()) - len(
        (tmp_path / "step_00000001" / checkpoint.INFO_NAME).read_bytes()
    )
    assert saver.finished() == []


def test_one_save_at_a_time_in_order(tmp_path):
    saver = Saver(tmp_path, keep_last=2)
    for step in range(1, 6):
        saver.save(step, step, state(step), {})
    saver.wait()
    assert [saved.step for saved in saver.finished()] == [1, 2, 3, 4, 5]
    assert checkpoint.published(Storage(tmp_path)) == ["step_00000005", "step_00000004"]
    assert value_of(checkpoint.newest(tmp_path, pytest.fail)) == 5.0


def test_a_failure_in_the_background_reaches_the_loop_and_the_next_save_works(tmp_path, monkeypatch):
    saver = Saver(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(
            HashingStream, "write", lambda self, data: (_ for _ in ()).throw(OSError(28, "No space left"))
        )
        saver.save(1, 1, state(1.0), {})
        with pytest.raises(SaveError, match=r"step 1 could not be written.*No space left"):
            saver.wait()
    saver.save(2, 2, state(2.0), {})
    saver.wait()
    assert value_of(checkpoint.newest(tmp_path, pytest.fail)) == 2.0


def test_memory_got_ahead_serves_every_save(tmp_path):
    saver, tensors = Saver(tmp_path), {"model": {name: torch.ones(300) for name in "abc"}}
    saver.allocate(tensors)
    places = {name: host.data_ptr() for name, host in saver._host.items()}
    assert len(places) == 3
    saver.save(1, 1, tensors, {})
    saver.wait()
    for tensor in tensors["model"].values():
        tensor.fill_(2.0)  # the next step
    saver.save(2, 2, tensors, {})
    assert {name: host.data_ptr() for name, host in saver._host.items()} == places
    saver.wait()
    for step in (1, 2):
        loaded = {"model": {name: torch.zeros(300) for name in "abc"}}
        checkpoint.load(checkpoint.open_checkpoint(tmp_path / f"step_{step:08d}"), loaded)
        assert all((tensor == step).all() for tensor in loaded["model"].values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_got_ahead_for_a_gpu_is_pinned(tmp_path):
    saver, tensors = Saver(tmp_path), {"model": {"a": torch.ones(300, device="cuda")}}
    saver.allocate(tensors)
    saver.save(1, 1, tensors, {})
    tensors["model"]["a"].fill_(2.0)  # the next step
    saver.wait()
    assert saver._host["model.a"].is_pinned()
    assert value_of(checkpoint.newest(tmp_path, pytest.fail)) == 1.0


def test_memory_that_is_not_to_be_had_ahead_matters_to_a_save_alone(tmp_path, monkeypatch):
    saver = Saver(tmp_path)

    def full(*_, **__):
        raise RuntimeError("can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", full)
        saver.allocate(state(1.0))
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            saver.save(1, 1, state(1.0), {})
    saver.save(2, 2, state(2.0), {})
    saver.wait()
    assert value_of(checkpoint.newest(tmp_path, pytest.fail)) == 2.0


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_an_fsspec_target(tmp_path, scheme):
    url = f"{scheme}://{tmp_path}/run"
    saver = Saver(url, keep_last=1, keep_every=2)
    for step in (1, 2, 3):
        saver.save(step, step, state(step), {})
    saver.wait()
    storage = Storage(url)
    assert checkpoint.published(storage) == ["step_00000003", "step_00000002"]
    found = checkpoint.newest(url, pytest.fail)
    assert found.path == f"{url}/step_00000003"
    assert value_of(found) == 3.0
    assert value_of(checkpoint.open_checkpoint(f"{url}/step_00000002")) == 2.0

    with storage.open(storage.path("step_00000003/__0_0.distcp"), "wb") as f:
        f.write(b"damaged")
    warned = []
    assert checkpoint.newest(url, warned.append).step == 2
    assert "step_00000003 is passed over: __0_0.distcp has 7 bytes" in warned[0]


def test_in_an_object_store_an_unfinished_save_is_no_checkpoint_and_is_swept(tmp_path):
    url = f"memory://{tmp_path}"
    save(url, 1, 1, state(1.0), {})
    save(url, 2, 2, state(2.0), {})
    storage = Storage(url)
    storage._fs.rm_file(storage.path(f"step_00000002/{checkpoint.INFO_NAME}"))
    checkpoint.sweep(url)
    assert checkpoint.newest(url, pytest.fail).step == 1
    assert storage.names() == ["step_00000001"]


# Forks a child for the n-th file operation of a save, kills it there (a write is torn in half first) or makes the
# operation fail as a full disk would, and looks at what a later start finds. Until a child gets through. On a disk, and
# behind fsspec (local://), where nothing is renamed, as in an object store.
_EVERY_OPERATION = r"""
import json, os, signal, sys
import torch
from nvfp4_train.distributed import checkpoint, saving, storage
from nvfp4_train.errors import SaveError
from tests.distributed.test_saving import state, value_of

mode, folder = sys.argv[1:]

def inject(n):
    count = 0
    def operation(name):
        nonlocal count
        count += 1
        if count == n:
            if mode == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(28, f"No space left on device ({name})")
    def audit(event, args):
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link"):
            paths = [a for a in args if isinstance(a, str | bytes | os.PathLike)]
            if event in ("os.remove", "os.rmdir") or any(os.fsdecode(p).startswith(folder) for p in paths):
                operation(event)
    sys.addaudithook(audit)
    write, fsync = storage.HashingStream.write, os.fsync
    def torn(self, data):
        if count + 1 == n:
            write(self, bytes(data)[: len(data) // 2])
            self.flush()
        operation("write")
        return write(self, data)
    def synced(fd):
        operation("fsync")
        fsync(fd)
    storage.HashingStream.write, os.fsync = torn, synced

def try_all(url):
    saving.save(url, 1, 1, state(1.0), {}, keep_last=1)
    found = []
    for n in range(1, 500):
        step = n + 1
        pid = os.fork()
        if pid == 0:
            inject(n)
            try:
                saving.save(url, step, step, state(step), {}, keep_last=1)
            except SaveError as error:
                os._exit(3)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        warned = []
        if mode == "kill":
            checkpoint.sweep(url)
        whole = checkpoint.newest(url, warned.append)
        hidden = [name for name in storage.Storage(url).names() if name.startswith(".")]
        found.append([status, whole.step == step, value_of(whole) == whole.step, warned, hidden])
        if n > 2 and status == 0:  # the second operation looks for leftovers, whose absence is no failure
            break
    return found

print(json.dumps({"disk": try_all(f"{folder}/disk"), "fsspec": try_all(f"local://{folder}/fsspec")}))
"""


@pytest.mark.parametrize("mode", ["kill", "full"])
def test_whatever_happens_at_any_file_operation_a_later_start_finds_a_whole_checkpoint(tmp_path, mode):
    for found in results_of(_EVERY_OPERATION, mode, str(tmp_path / "run")).values():
        assert len(found) > 40
        assert found[-1][:2] == [0, True]
        assert {status for status, *_ in found[2:-1]} == {-9 if mode == "kill" else 3}
        published = [new for _, new, *_ in found[2:]]
        assert published == sorted(published)  # from one operation on the new checkpoint is there
        assert not published[0]
        for _, _, whole, warned, hidden in found:
            assert whole
            assert warned == hidden == []
