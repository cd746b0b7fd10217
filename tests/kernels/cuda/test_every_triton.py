"""The numbers of the kernels with every Triton that CUDA builds of torch pin, in its interpreter.

Each is installed in a folder of its own with a NumPy that its interpreter can work with: before Triton 3.7 it takes
``int()`` of arrays with one element, which NumPy refuses from 2.4 on. Runs where ``SAFUSION_VERSIONS=1`` asks for it.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from lab.kernels import study
from tests.packaging.environments import ROOT, run
from tests.packaging.test_versions import ASKED

NUMPY = "2.3.5"


@pytest.mark.slow
@pytest.mark.skipif(not ASKED, reason="downloads 2 GB: SAFUSION_VERSIONS=1 asks for it")
@pytest.mark.parametrize("version", study.TRITONS)
def test_messages_means_and_residuals_are_equal(version: str, tmp_path: Path) -> None:
    try:
        study.install("triton", version, tmp_path)
        study.install("numpy", NUMPY, tmp_path)
    except ConnectionError as error:
        pytest.skip(str(error))
    paths = os.pathsep.join(map(str, (tmp_path, ROOT)))
    found = "import numpy, triton; print(triton.__version__, numpy.__version__)"
    assert run(sys.executable, "-c", found, PYTHONPATH=paths).split() == [version, NUMPY]
    options = ("-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow", "-W", "ignore::RuntimeWarning")
    variables = {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    printed = run(sys.executable, "-m", "pytest", *options, Path(__file__).parent, cwd=ROOT, timeout=1500, **variables)
    assert re.search(r"\d+ passed", printed)
