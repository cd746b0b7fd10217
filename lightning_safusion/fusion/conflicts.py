"""Settings that do not go together: one table, for the errors and for ``docs/limits.md``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from lightning_safusion.comm.catalogue import COLLECTIVES, find_collective
from lightning_safusion.comm.wire.elias_fano import EliasFanoCodec
from lightning_safusion.comm.wire.formats import value_format
from lightning_safusion.comm.wire.values import VALUES
from lightning_safusion.fusion.plans.registry import POLICIES
from lightning_safusion.lookup import QuotaRule, Scope, SelectBy
from lightning_safusion.sparsify.memory.residual import MEMORIES

if TYPE_CHECKING:
    from lightning_safusion.fusion.settings import EngineSettings

# What each setting can be. Parts stand as classes, which have the flags of their objects.
_KNOWN: dict[str, Collection[Any]] = {
    "scope": get_args(Scope),
    "quota": get_args(QuotaRule),
    "select_by": get_args(SelectBy),
    "offload": (False, True),
    "fusion": POLICIES,
    "memory": MEMORIES.values(),
    "collective": COLLECTIVES.keys(),
    "wire": VALUES.keys(),
}


@dataclass(frozen=True)
class Some:
    """Some values of one setting: those that it ``has``, in ``words``; by default their names are listed."""

    setting: str
    has: Callable[[Any], bool]
    words: str = ""

    def given(self, settings: Any) -> bool:
        """Whether the setting has one of these values."""
        return self.has(getattr(settings, self.setting))

    def shown(self, settings: EngineSettings) -> str:
        """The setting with its value."""
        return f"{self.setting}={_name(getattr(settings, self.setting))}"

    def __str__(self) -> str:
        if self.words:
            return self.words
        names: dict[bool, list[str]] = {True: [], False: []}
        for value in _KNOWN[self.setting]:
            names[bool(self.has(value))].append(_name(value))
        if len(names[True]) <= len(names[False]):
            return f"{self.setting}={_listed(names[True], 'or')}"
        return f"a {self.setting} other than {_listed(names[False], 'and')}"


@dataclass(frozen=True)
class Conflict:
    """Values of one setting that need all of some values of others.

    ``because``: the reason, a clause whose subject is the setting.
    """

    when: Some
    because: str
    needs: Sequence[Some]

    def met(self, settings: Any) -> bool:
        """Whether settings, or parts by the same names, are what is needed, of whatever value."""
        return all(need.given(settings) for need in self.needs)

    def check(self, settings: EngineSettings) -> None:
        """Raises :class:`ValueError` if the settings have such a value, and not what it needs."""
        if self.when.given(settings) and not self.met(settings):
            needed = _listed([str(need) for need in self.needs], "and")
            given = _listed([need.shown(settings) for need in self.needs], "and")
            raise ValueError(f"{self.when.shown(settings)} {self.because}: it needs {needed}, got {given}")


def _is(*values: object) -> Callable[[Any], bool]:
    return lambda value: value in values


def _named(*names: str) -> Callable[[Any], bool]:
    return lambda part: part.name in names


def _collective(able: Callable[[Any], bool]) -> Some:
    return Some("collective", lambda name: able(find_collective(name)))


_EACH_TENSOR = Some("scope", _is("tensor"))
_NO_OFFLOAD = Some("offload", _is(False))
_NO_STREAM = Some("fusion", lambda policy: not policy.streams)
_AS_SENT = _collective(lambda row: row.few_bits)

UPDATES = Conflict(
    Some("select_by", _is("update")),
    "compares elements before they are sent, with the optimizer's state at hand",
    (_NO_OFFLOAD, _AS_SENT),
)
FEW_BITS = Conflict(
    Some("wire", lambda wire: value_format(wire).few_bits),
    "rounds so much that the rounding error must stay in the sender's residual, which only messages that arrive as "
    "they were sent allow",
    (_AS_SENT, _NO_STREAM),
)
SHARDS = Conflict(
    _collective(lambda row: row.exchange.ability.cuts_tensors),
    "gives every worker's part of a tensor a number of entries of its own, and the owners of parts read positions as "
    f"{EliasFanoCodec.layout!r} writes them",
    (
        _NO_OFFLOAD,
        Some("quota", lambda quota: quota != "pooled"),
        Some("fusion", lambda policy: not policy.streams and not policy.ticking),
        Some(
            "wire",
            lambda wire: wire.rpartition("-")[0] in ("", EliasFanoCodec.layout),
            f"values alone (as in wire='bf16') or with {EliasFanoCodec.layout!r}",
        ),
    ),
)
#: All of them; the first that applies is the error.
CONFLICTS = (
    Conflict(Some("quota", _is("shared", "pooled")), "gives every tensor a floor", (_EACH_TENSOR,)),
    Conflict(
        Some("offload", _is(True)),
        "selects from each tensor alone, as soon as it is ready",
        (_EACH_TENSOR, Some("quota", _is("proportional")), _NO_STREAM),
    ),
    Conflict(
        Some("fusion", _named("selective")),
        "decides for every tensor of a buffer how much it sends",
        (_EACH_TENSOR,),
    ),
    Conflict(
        Some("fusion", lambda policy: policy.streams),
        "fills buffers with selected elements, which have no lanes or levels of their own",
        (_EACH_TENSOR, _collective(lambda row: not row.dense_lane and not row.levels)),
    ),
    FEW_BITS,
    Conflict(
        _collective(lambda row: row.exchange.ability.selects_itself),
        "selects the largest sums of a node itself",
        (Some("compressor", _named("topk"), "compressor='topk'"), _NO_OFFLOAD),
    ),
    SHARDS,
    Conflict(
        Some("fusion", lambda policy: policy.ticking),
        "has other buffers in every step, which are not known before",
        (_EACH_TENSOR, _collective(lambda row: row.stream_ordered), _NO_OFFLOAD),
    ),
    Conflict(
        Some("memory", lambda memory: memory.lives_on_sparsity),
        "is the momentum of the residual, of which a dense all-reduce leaves none",
        (_collective(lambda row: row.choice != "allreduce"),),
    ),
    Conflict(
        Some("memory", _named("ef21")),
        "sums all that is sent: what is dropped on the way would make the estimates of workers differ",
        (_collective(lambda row: row.exchange.ability.conserves),),
    ),
    UPDATES,
    Conflict(
        Some("integrity", _is("checksum"), "integrity='checksum'"),
        "verifies messages before they are decoded: sums of an all-reduce are none, and where workers fill buffers at "
        "their own pace a damaged message does not say how many follow",
        (_collective(lambda row: row.choice != "allreduce"), _NO_STREAM),
    ),
)


def _name(value: Any) -> str:
    return repr(value if isinstance(value, str | bool) else value.name)


def _listed(texts: Sequence[str], last: str) -> str:
    return f" {last} ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))
