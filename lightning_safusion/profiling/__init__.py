"""Where the time of a training step goes: records, figures, traces and pictures. Independent of Lightning."""

from lightning_safusion.profiling.figures import StepFigures, buffer_means
from lightning_safusion.profiling.overlap_file import load_timeline
from lightning_safusion.profiling.pictures import plot_step
from lightning_safusion.profiling.recorder import StepRecorder
from lightning_safusion.profiling.timeline import BufferTimeline, Phase, StepTimeline, WindowTimeline
from lightning_safusion.profiling.trace import merge_traces, trace_events, write_trace

__all__ = [
    "BufferTimeline",
    "Phase",
    "StepFigures",
    "StepRecorder",
    "StepTimeline",
    "WindowTimeline",
    "buffer_means",
    "load_timeline",
    "merge_traces",
    "plot_step",
    "trace_events",
    "write_trace",
]
