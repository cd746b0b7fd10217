"""Where the time of a training step goes: records, figures, traces and pictures. Independent of Lightning."""

from lightning_safusion.profiling.figures import StepFigures
from lightning_safusion.profiling.overlap_file import load_timeline
from lightning_safusion.profiling.pictures import plot_step
from lightning_safusion.profiling.trace import merge_traces

__all__ = ["StepFigures", "load_timeline", "merge_traces", "plot_step"]
