"""The papers' workloads: one program, one configuration for each. ``README.md`` beside this file lists the commands.

python -m examples.workloads fit --config examples/workloads/configs/lstm_wikitext2.yaml
python -m examples.workloads validate --config CONFIG --ckpt_path CHECKPOINT
"""

from __future__ import annotations

from examples.workloads.cli import WorkloadCLI

if __name__ == "__main__":
    WorkloadCLI()
