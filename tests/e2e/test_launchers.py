"""Lightning's own launchers: however the workers are started, the training is the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.processes import started
from tests.e2e.training import LIMIT, assert_same, assert_sparse, command

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("launcher", ["spawn", "fork"])
def test_spawn_and_fork_train_as_popen_does(tmp_path: Path, reference: Path, launcher: str) -> None:
    with started(command(tmp_path, "--devices", "2", "--launcher", launcher), tmp_path / "output") as training:
        assert_sparse(training.finish(LIMIT))
    assert_same(tmp_path, reference)
