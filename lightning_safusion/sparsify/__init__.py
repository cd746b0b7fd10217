"""Sparsifiers, error-feedback memories and density schedules."""

from lightning_safusion.sparsify.adtopk import ADTopk
from lightning_safusion.sparsify.base import Segments, Selection, Sparsifier, as_selection, element_quota, span_segments
from lightning_safusion.sparsify.basic import NoCompression, RandomK, Threshold, TopK
from lightning_safusion.sparsify.dgc import DGC
from lightning_safusion.sparsify.gaussiank import GaussianK
from lightning_safusion.sparsify.memory.contract import Memory
from lightning_safusion.sparsify.memory.momentum import DGCMemory, EF21Memory
from lightning_safusion.sparsify.memory.residual import (
    AutoMemory,
    DecoupledMomentum,
    NoMemory,
    ResidualMemory,
    resolve_memory,
)
from lightning_safusion.sparsify.oktopk import OkTopk
from lightning_safusion.sparsify.redsync import RedSync
from lightning_safusion.sparsify.registry import available_sparsifiers, resolve_sparsifier
from lightning_safusion.sparsify.schedule import (
    ConstantDensity,
    DenseStart,
    DensitySchedule,
    DGCWarmup,
    ExponentialRamp,
    LinearRamp,
    resolve_density,
)
from lightning_safusion.sparsify.selection.select import SegmentedView, ThresholdSparsifier, pooled, segmented_view
from lightning_safusion.sparsify.selection.survey import History, SpanSurvey
from lightning_safusion.sparsify.sidco import SIDCo

__all__ = [
    "DGC",
    "ADTopk",
    "AutoMemory",
    "ConstantDensity",
    "DGCMemory",
    "DGCWarmup",
    "DecoupledMomentum",
    "DenseStart",
    "EF21Memory",
    "DensitySchedule",
    "ExponentialRamp",
    "GaussianK",
    "History",
    "LinearRamp",
    "Memory",
    "NoCompression",
    "NoMemory",
    "OkTopk",
    "RandomK",
    "RedSync",
    "ResidualMemory",
    "SIDCo",
    "SegmentedView",
    "Segments",
    "Selection",
    "SpanSurvey",
    "Sparsifier",
    "Threshold",
    "ThresholdSparsifier",
    "TopK",
    "as_selection",
    "available_sparsifiers",
    "element_quota",
    "pooled",
    "resolve_density",
    "resolve_memory",
    "resolve_sparsifier",
    "segmented_view",
    "span_segments",
]
