"""Networks of ``transformers``, with random weights or with published ones from a local folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from transformers import PretrainedConfig, PreTrainedModel

from examples.workloads.files import require_files

Network = TypeVar("Network", bound=PreTrainedModel)


def build(
    network: type[Network], config: PretrainedConfig, folder: Path | None, hub: str, option: str, new: str
) -> Network:
    """Builds a network, ready to be trained.

    Args:
        network: Its class.
        config: Its sizes.
        folder: Folder with ``config.json`` and ``model.safetensors`` (or ``pytorch_model.bin``) of the same sizes.
            Nothing: random weights.
        hub: Who publishes such folders on huggingface.co, for the message.
        option: The option that names the folder, for the message.
        new: The layer that the published weights need not have, or not in this size: it begins with random weights.

    Returns:
        The network.

    Raises:
        FileNotFoundError: If a file is missing; says where to get it and where to put it.
        ValueError: If weights of other layers are missing or of another size; ``transformers`` itself would train
            them from random ones.
    """
    if folder is None:
        return network(config).train()
    folder = Path(folder)
    source = f"them from https://huggingface.co/{hub}/{folder.name}"
    weights = "pytorch_model.bin" if (folder / "pytorch_model.bin").exists() else "model.safetensors"
    require_files(folder, ("config.json", weights), source, option)
    loaded: Any = network.from_pretrained(  # two values, which its annotation does not know
        folder, config=config, local_files_only=True, ignore_mismatched_sizes=True, output_loading_info=True
    )
    built, found = loaded
    wrong = {*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])}
    if wrong := {key for key in wrong if key.split(".")[0] != new}:
        raise ValueError(
            f"{folder / weights} does not fit the sizes of the model: missing or of another shape are {min(wrong)} and "
            f"{len(wrong) - 1} others. Give the sizes in {folder / 'config.json'}, or other weights."
        )
    return built.train()  # from_pretrained leaves dropout off
