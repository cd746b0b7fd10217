"""Callbacks that show what the strategy does, and check it."""

from lightning_safusion.callbacks.missing_rate import TensorMissingRateMonitor
from lightning_safusion.callbacks.overlap import OverlapProfiler
from lightning_safusion.callbacks.replicas import ReplicaConsistencyCheck
from lightning_safusion.callbacks.trace_recorder import TraceRecorder
from lightning_safusion.callbacks.tuner import BufferSizeTuner

__all__ = [
    "BufferSizeTuner",
    "OverlapProfiler",
    "ReplicaConsistencyCheck",
    "TensorMissingRateMonitor",
    "TraceRecorder",
]
