"""A save that is interrupted, or fails, keeps the residuals of the checkpoint that it was to replace.

Ranks are killed, files limited in size, and Lightning's writer (a public method) made to fail or to take its time.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor

from tests.integration.test_checkpoint import complaints, ours
from tests.models import equal
from tests.process_group import run_ranks
from tests.resume import At, parameters, run, saving

WRITE = TorchCheckpointIO.save_checkpoint


def _kill_before(*args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_after(*args: Any, **kwargs: Any) -> None:
    WRITE(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGKILL)


def _fail(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "the main file")


def _write_slowly(*args: Any, **kwargs: Any) -> None:
    time.sleep(1)
    WRITE(*args, **kwargs)


def _writing(write: Callable[..., None]) -> Callable[[Trainer], None]:
    """Has Lightning write main files in another way from now on; for ranks in processes of their own."""

    def change(trainer: Trainer) -> None:
        TorchCheckpointIO.save_checkpoint = write  # type: ignore[method-assign]

    return change


def _names(path: Path) -> list[str]:
    return sorted(file.name for file in Path(f"{path}.safusion").iterdir())


def _expected(path: Path) -> list[str]:
    nonce = torch.load(path, weights_only=True)["safusion"]["nonce"]
    return [f"rank_0000{rank}-{nonce}.pt" for rank in range(2)]


def _interrupted(rank: int, path: Path, write: Callable[..., None]) -> None:
    run(ours(), 9, saving(path, 3), At(4, _writing(write)), saving(path, 5), deterministic=True)


def _resume(rank: int, path: Path) -> dict[str, Any]:
    with complaints() as said:
        resumed = run(ours(), 9, saving(path, 8), ckpt=path, deterministic=True)
    return {"complaints": said, "same": equal(parameters(resumed), _whole())}


@cache
def _whole() -> list[Tensor]:
    """What an uninterrupted training ends with."""
    return run_ranks(2, lambda rank: parameters(run(ours(), 9, deterministic=True)))[0]


def _assert_resumes(path: Path, step: int) -> None:
    assert torch.load(path, weights_only=True)["global_step"] == step
    _whole()  # here, for the processes that are forked next
    assert run_ranks(2, _resume, path) == [{"complaints": [], "same": True}] * 2
    assert _names(path) == _expected(path)  # orphans went with the next save


@pytest.mark.parametrize(("write", "step"), [(_kill_before, 3), (_kill_after, 5)])
def test_a_job_killed_in_a_save_resumes_with_its_residuals(
    tmp_path: Path, write: Callable[..., None], step: int
) -> None:
    path = tmp_path / "last.ckpt"
    with pytest.raises(RuntimeError, match="died without a report"):
        run_ranks(2, _interrupted, path, write)
    assert len(_names(path)) == 4
    (tmp_path / "last.ckpt.safusion" / "rank_00000-0123.pt.tmp").touch()
    _assert_resumes(path, step)


def test_a_main_file_that_cannot_be_written_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    with pytest.raises(RuntimeError) as caught:
        run_ranks(2, _interrupted, path, _fail)
    assert "last.ckpt could not be saved: rank 0: No space left on device: the main file" in str(caught.value)
    assert "[Errno 28] No space left on device: 'the main file'" in str(caught.value)
    assert _names(path) == _expected(path)
    _assert_resumes(path, 3)


def _saved_once(rank: int, path: Path) -> None:
    run(ours(), 2, saving(path, 1))


def test_the_next_save_removes_old_parts_whose_main_checkpoint_never_came_to_exist(tmp_path: Path) -> None:
    path, hours_ago = tmp_path / "step=9.ckpt", time.time() - 2 * 3600
    kept = {"step=9", "young", "foreign", "complete"}
    for name in {*kept, "orphan", "half"} - {"step=9"}:
        part = tmp_path / f"{name}.ckpt.safusion" / ("notes.txt" if name == "foreign" else "rank_00001-0123abc.pt")
        part.parent.mkdir()
        part = part.with_name(f"{part.name}.tmp") if name == "half" else part
        part.touch()
        os.utime(part, (hours_ago, hours_ago) if name != "young" else None)
    (tmp_path / "complete.ckpt").touch()
    run_ranks(2, _saved_once, path)
    assert {folder.name for folder in tmp_path.glob("*.safusion")} == {f"{name}.ckpt.safusion" for name in kept}


def _limited(rank: int, path: Path, limited: int) -> None:
    def limit(trainer: Trainer) -> None:
        if rank == limited:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))

    run(ours(), 9, saving(path, 3), At(4, limit), saving(path, 5))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_that_does_not_fit_on_the_disk_is_an_error_that_says_so(tmp_path: Path, rank: int) -> None:
    path = tmp_path / "last.ckpt"
    with pytest.raises(RuntimeError) as caught:
        run_ranks(2, _limited, path, rank)
    assert str(caught.value).count(f"OSError: no residuals could be written to {path}.safusion: rank {rank}: ") == 2
    assert f"{path}.safusion/rank_0000{rank}-" in str(caught.value)
    assert os.strerror(errno.EFBIG) in str(caught.value)
    assert _names(path) == _expected(path)  # neither parts of the other rank nor temporary files
    _assert_resumes(path, 3)


def _asynchronous(rank: int, path: Path) -> dict[str, Any]:
    seen = {}

    def look(key: str, trainer: Trainer) -> None:
        trainer.strategy.barrier()
        seen[key] = len(_names(path))
        trainer.strategy.barrier()

    steps = [saving(path, 2), At(3, _writing(_write_slowly)), saving(path, 4), At(4, partial(look, "under way"))]
    # the third finds the second in place, since it waits for it
    steps += [saving(path, 6), At(6, partial(look, "the next"))]
    run(ours(), 7, *steps, plugins=[AsyncCheckpointIO()], deterministic=True)
    return seen


def test_parts_stay_until_an_asynchronous_write_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    # each time the parts of what is in place and of what is under way
    assert run_ranks(2, _asynchronous, path) == [{"under way": 4, "the next": 4}] * 2
    assert _names(path) == _expected(path)
    _assert_resumes(path, 6)


def _killed_asynchronously(rank: int, path: Path) -> None:
    steps = [saving(path, 2), At(3, _writing(_write_slowly)), saving(path, 4), At(5, _kill_before)]
    run(ours(), 7, *steps, plugins=[AsyncCheckpointIO(TorchCheckpointIO())], deterministic=True)


def test_a_job_killed_before_an_asynchronous_write_ends_resumes_with_its_residuals(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    with pytest.raises(RuntimeError, match="died without a report"):
        run_ranks(2, _killed_asynchronously, path)
    _assert_resumes(path, 2)


def _weights_only(rank: int, path: Path) -> str:
    job = run(ours(), 4, saving(path, 3), At(4, _writing(_fail)))
    try:
        job.strategy.save_checkpoint({"state_dict": {}}, path)
    except OSError as error:
        return str(error)
    return ""


def test_weights_that_cannot_be_written_leave_the_parts_of_the_earlier_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    assert run_ranks(2, _weights_only, path) == ["[Errno 28] No space left on device: 'the main file'", ""]
    assert _names(path) == _expected(path)
