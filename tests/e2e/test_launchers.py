"""Lightning's own launcher by spawn: the training is the same. Those by fork are most of the quick tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.processes import started
from tests.e2e.training import LIMIT, assert_same, assert_sparse, command

pytestmark = pytest.mark.slow


def test_spawned_workers_train_as_popen_does(tmp_path: Path, reference: Path) -> None:
    with started(command(tmp_path, "--devices", "2", "--launcher", "spawn"), tmp_path / "output") as training:
        assert_sparse(training.finish(LIMIT))
    assert_same(tmp_path, reference)
