"""What a package of parts tests: ``pip install -e plugin && pytest plugin``."""

from my_plugin import Halved, Stride  # type: ignore[import-not-found]  # where it is not installed

from lightning_safusion import SAFusionStrategy
from lightning_safusion.testing import check_memory, check_sparsifier


def test_the_compressor_keeps_its_rules() -> None:
    check_sparsifier(Stride)


def test_the_memory_keeps_its_rules() -> None:
    check_memory(Halved)


def test_the_parts_are_found_by_their_names() -> None:
    settings = SAFusionStrategy(system="mine").settings
    found = [part.name for part in (settings.compressor, settings.memory, settings.fusion)]
    assert found == ["stride", "halved", "halves"]
