"""Where the time of a training step goes: records, figures, timelines and pictures. Independent of Lightning."""

from lightning_safusion.profiling.figures import StepFigures
from lightning_safusion.profiling.overlap_file import load_timeline
from lightning_safusion.profiling.pictures import plot_step
from lightning_safusion.profiling.timeline_file import merge_timelines

__all__ = ["StepFigures", "load_timeline", "merge_timelines", "plot_step"]
