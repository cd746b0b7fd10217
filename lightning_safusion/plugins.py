"""What groupings, collectives and systems of another package are made of."""

from lightning_safusion.comm.catalogue import Collective, Communicators, SparseBuffer
from lightning_safusion.comm.exchange import Ability, Exchange, Part, SpanSpec, Verdict
from lightning_safusion.comm.transport.interface import Transport, Work
from lightning_safusion.comm.wire.codec import Codec
from lightning_safusion.fusion.plans.costs import GroupCosts
from lightning_safusion.fusion.plans.plan import Group, Plan
from lightning_safusion.fusion.plans.pricing import GroupPricer
from lightning_safusion.systems import EngineSystem

__all__ = [
    "Ability",
    "Codec",
    "Collective",
    "Communicators",
    "EngineSystem",
    "Exchange",
    "Group",
    "GroupCosts",
    "GroupPricer",
    "Part",
    "Plan",
    "SpanSpec",
    "SparseBuffer",
    "Transport",
    "Verdict",
    "Work",
]
