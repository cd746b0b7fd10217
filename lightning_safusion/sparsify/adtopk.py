"""ADTopk: exact Top-k in every row of a gradient matrix ("All-Dimension Top-k", Ming et al., HPDC 2024)."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lightning_safusion.lookup import check_name
from lightning_safusion.sparsify.base import Segments, Selection, Sparsifier, constant_of_segments, element_quota
from lightning_safusion.sparsify.oktopk import OkTopk
from lightning_safusion.sparsify.selection.select import largest, pooled
from lightning_safusion.sparsify.selection.survey import SpanSurvey
from lightning_safusion.sparsify.selection.torch_view import compact

# Steps in which Top-k is exact before its threshold is reused: gradients change fastest at the beginning.
_WARM_UP = 15

Rule = Literal["dim1", "dim0", "longer", "rows"]


class ADTopk(Sparsifier):
    """The largest elements of every row, so that each output (or input) channel is updated in every step.

    A row of ``C`` elements sends ``max(1, floor(C * density))``. Below a density of ``1 / C`` the one element per row
    exceeds the requested density: the first convolution of a ResNet has rows of 3 under ``"dim1"`` and sends a third.

    The quota of a segment is shared out evenly over its rows; a remainder (a quota that was made for something else,
    such as a merged buffer) goes to the rows whose next element is largest. Tensors with fewer than two dimensions,
    and segments that are not one tensor, are a single row.

    Args:
        rule: What a row is. ``"dim1"`` runs along the second dimension (the input channels of a layer; the published
            rule), ``"dim0"`` along the first, ``"longer"`` along the longer of these two, ``"rows"`` over everything
            but the first dimension.
        interleave: Every second step selects by plain Top-k over the whole segment instead, at the same quota.
        refresh: Steps between exact selections of that Top-k, after the first 15 steps (the authors begin with 5 for
            ResNet, 10 for VGG, 20 for BERT); in between what exceeds the smallest magnitude of the latest exact one is
            sent, the largest of it where that is more than the quota. None selects exactly, always.

    Raises:
        ValueError: If the rule is unknown, or there is nothing to refresh.
    """

    name: ClassVar[str] = "adtopk"

    def __init__(self, rule: Rule = "dim1", interleave: bool = False, refresh: int | None = None) -> None:
        check_name("rule", rule, get_args(Rule))
        if refresh is not None and not interleave:
            raise ValueError(f"refresh={refresh} is about Top-k, which only interleave=True selects by")
        self.rule: Rule = rule
        self.interleave = interleave
        self.refresh = refresh
        self._reused = OkTopk(refresh, control="none") if refresh is not None else None

    @property
    def estimates(self) -> bool:
        """Fewer elements than the quota may exceed a threshold that is reused."""
        return self._reused is not None

    def quota(self, numel: int, shape: tuple[int, ...], density: float) -> int:
        """Rows times elements per row."""
        if numel == 0:
            return 0
        matrix, axis = _matrix(shape, self.rule)
        return numel // matrix[axis] * element_quota(matrix[axis], density)

    def select(self, x: Tensor, segments: Segments, step: int, survey: SpanSurvey | None = None) -> Selection:
        if segments.pool:
            return pooled(x, segments, self._top_rows, survey)
        if not self.interleave or step % 2 == 0:
            return self._top_rows(x, segments)
        if self._reused is not None and step >= _WARM_UP:
            return self._reused.select(x, segments, step, survey)
        return largest(x, segments, survey)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._reused is None else self._reused.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._reused is None:
            super().load_state_dict(state)
        else:
            self._reused.load_state_dict(state)

    def _top_rows(self, x: Tensor, segments: Segments) -> Selection:
        magnitude = torch.nan_to_num(x.abs(), nan=math.inf, posinf=math.inf)  # NaN counts as largest
        keep = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
        for members in _alike(segments, self.rule):
            rows = [piece.rows(magnitude).flatten(0, -2) for piece in members]
            chosen = top_per_row(torch.cat(rows), sum(piece.quota for piece in members))
            for piece, part in zip(members, chosen.split([len(block) for block in rows]), strict=True):
                own = piece.rows(keep)
                own.copy_(part.view(own.shape))
        # on a device nonzero() would wait for the count, which the host knows
        indices = keep.nonzero().squeeze(1) if keep.is_cpu else compact(keep, segments.capacity)
        return Selection(indices, x[indices], segments.capacity)


class _Piece(NamedTuple):
    """A segment, the elements from ``start`` to ``stop``, as a tensor along whose axis its rows run."""

    start: int
    stop: int
    matrix: tuple[int, ...]
    axis: int
    quota: int

    def rows(self, span: Tensor) -> Tensor:
        """A view [..., C] of its rows in a span [N]."""
        return span[self.start : self.stop].view(self.matrix).movedim(self.axis, -1)


@constant_of_segments
def _alike(segments: Segments, rule: Rule) -> list[list[_Piece]]:
    """The segments that send something, those whose rows are of one length and send alike together."""
    groups: dict[tuple[int, ...], list[_Piece]] = {}
    starts, sizes, quotas = segments.edges[:-1].tolist(), segments.sizes.tolist(), segments.quotas.tolist()
    for start, size, quota, shape in zip(starts, sizes, quotas, segments.shapes, strict=True):
        if quota:
            matrix, axis = _matrix(shape if math.prod(shape) == size else (size,), rule)
            each, rest = divmod(quota, size // matrix[axis])
            # a remainder goes to rows of its own tensor
            key = (matrix[axis], each) if rest == 0 else (matrix[axis], each, start)
            groups.setdefault(key, []).append(_Piece(start, start + size, matrix, axis, quota))
    return list(groups.values())


def _matrix(shape: tuple[int, ...], rule: Rule) -> tuple[tuple[int, ...], int]:
    """The shape under which a tensor is cut into rows, and the axis along which a row runs."""
    if len(shape) < 2:
        return (1, math.prod(shape)), 1
    if rule == "rows":
        return (shape[0], math.prod(shape[1:])), 1
    along_first = rule == "dim0" or (rule == "longer" and shape[0] > shape[1])
    return shape, 0 if along_first else 1


def top_per_row(rows: Tensor, quota: int) -> Tensor:
    """Marks (bool [R, C]) the ``quota`` largest magnitudes (float32 [R, C], no NaN), shared out evenly over the rows.

    On ties the lowest column and the lowest row come first.
    """
    each, rest = divmod(quota, rows.shape[0])
    top = torch.topk(rows, each + (rest > 0), dim=1).values
    ranks = torch.full((rows.shape[0], 1), each, device=rows.device, dtype=torch.int64)
    if rest:
        favoured = torch.sort(top[:, -1], descending=True, stable=True).indices[:rest]
        ranks.index_fill_(0, favoured, each + 1)
    last = top.gather(1, (ranks - 1).clamp(min=0))
    above, ties = rows > last, rows == last
    room = ranks - above.sum(1, keepdim=True)
    return above | (ties & (ties.cumsum(1, dtype=torch.int32) <= room))
