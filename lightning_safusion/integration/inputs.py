"""What every worker's batch counts in the mean of the gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, get_args

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_safusion.announce import announce
from lightning_safusion.integration.uneven import Team, UnevenInputs, UnevenLoader, uneven_loader
from lightning_safusion.lookup import check_name

#: How batches are weighted: workers alike, if they have a batch; by samples; or the sum over all workers, whether they
#: have a batch or not, divided by their number.
Weighting = Literal["workers", "samples", "world"]

_AS_DDP = ("error", "workers")
_UNKNOWN = -1
_SAMPLES = "the count of all workers' samples"


def check_inputs(uneven: UnevenInputs, weighting: Weighting, system: str) -> None:
    """Raises ValueError if an argument is not one of the possible ones, or they do not go together."""
    check_name("uneven_inputs", uneven, get_args(UnevenInputs))
    check_name("weighting", weighting, get_args(Weighting))
    if weighting == "world" and uneven != "join":
        raise ValueError(
            f"weighting='world' counts workers that have no batch left, which uneven_inputs={uneven!r} never has: "
            "use it with uneven_inputs='join'."
        )
    if system == "easgd" and (uneven, weighting) != _AS_DDP:
        raise ValueError(
            f"system='easgd' averages no gradients: uneven_inputs={uneven!r}, weighting={weighting!r} would change the "
            "steps of its workers. Leave them out."
        )


class Inputs:
    """The batches of one fit: which workers have one of their own, and how much each counts.

    A worker's loss is multiplied by its share before the backward pass, so before error feedback, and whatever carries
    the gradients.

    Args:
        uneven: What happens where workers have different numbers of batches.
        weighting: How the gradients of the workers are weighted.
        workers: Their number.
        make_team: Makes the group of all, where they first need it; None where there is none.

    Raises:
        MisconfigurationException: If several workers need a group, and there is none.
    """

    def __init__(
        self,
        uneven: UnevenInputs = "error",
        weighting: Weighting = "workers",
        workers: int = 1,
        make_team: Callable[[], Team] | None = None,
    ) -> None:
        if workers > 1 and make_team is None and (uneven, weighting) != _AS_DDP:
            raise MisconfigurationException(
                f"uneven_inputs={uneven!r} and weighting={weighting!r} need torch's process group of all workers: they "
                "work neither over Horovod nor with a process_group of some."
            )
        self._uneven, self._weighting, self._make_team = uneven, weighting, make_team
        self._team: Team | None = None
        self._loaders: list[UnevenLoader] = []
        self._having: list[bool] = []  # by rank, of the present batch; empty where all have one
        self._samples: Callable[[], list[int]] | None = None  # of all workers' batches, on their way
        self._share: float | None = None  # of the present batch, once it is known
        self._given: int | None = None  # by the output of the training step
        self._gives: bool | None = None  # outputs have the number of samples; None before the first batch

    def __deepcopy__(self, memo: object) -> Inputs:
        return self  # of a strategy that is copied: a process has one group

    @property
    def idle(self) -> bool:
        """Whether this worker has no batch of its own any more, and repeats one that counts nothing."""
        return bool(self._having) and self._team is not None and not self._having[self._team.rank]

    def take(self, loader: Iterable[Any], module: LightningModule) -> Iterable[Any]:
        """A loader of training, with as many batches as on all workers, where that was asked for. Collective.

        Raises:
            MisconfigurationException: If the training step fetches its batches itself.
        """
        if self._make_team is None or self._uneven == "error":
            return loader
        if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
            raise MisconfigurationException(
                f"uneven_inputs={self._uneven!r} needs batches that Lightning fetches: let training_step take a batch "
                "in place of dataloader_iter."
            )
        self._team = self._team or self._make_team()
        if any(each.begun for each in self._loaders):  # all are loaded anew
            self._loaders = []
        own = loader.own if isinstance(loader, UnevenLoader) else loader  # a CombinedLoader keeps those of before
        uneven = uneven_loader(own, self._team, joins=self._uneven == "join")
        self._loaders.append(uneven)
        if (lengths := uneven.lengths) is not None and len(set(lengths)) > 1:
            joined = "who has none left repeats the last one, which counts nothing"
            what = f"all stop after {min(lengths)}" if self._uneven == "stop" else joined
            announce(f"workers have {', '.join(map(str, lengths))} batches: {what}")
        return uneven

    def begin(self, batch: Any) -> None:
        """A batch is about to be trained on. All workers are told how many samples it has, where that counts."""
        having = [loader.having() for loader in self._loaders]
        # a loader that has ended on all workers has no part in the batch
        self._having = [all(column) for column in zip(*filter(None, having), strict=True)]
        self._share, self._given, self._samples = None, None, None
        if self._weighting == "samples" and self._make_team is not None and not self._gives:
            self._team = self._team or self._make_team()
            try:
                samples = extract_batch_size(batch)
            except MisconfigurationException:
                samples = _UNKNOWN
            self._samples = self._team.gather(0 if self.idle else samples, _SAMPLES)

    def end_step(self, output: Any) -> None:
        """The training step has returned, maybe with the number of its samples."""
        given = output.get("batch_size") if isinstance(output, Mapping) else None
        self._given = None if given is None else int(given)

    def weigh(self, loss: Tensor) -> Tensor:
        """The loss of this worker's batch, times its share: 1 on average over the workers. Collective.

        Raises:
            MisconfigurationException: If the number of samples is not known, on all workers.
        """
        if self._share is None:
            self._share = self._find_share()
        if self._share == 0.0:
            loss = loss.nan_to_num(0.0, 0.0, 0.0)  # a batch that counts nothing must not be able to end a training
        return loss if self._share == 1.0 else loss * self._share

    def _find_share(self) -> float:
        if self._team is None:
            return 1.0
        if self._weighting == "samples":
            weights = self._all_samples(self._team)
        else:
            weights = [int(has) for has in self._having] or [1] * self._team.size
        total = len(weights) if self._weighting == "world" else sum(weights)
        return len(weights) * weights[self._team.rank] / total if total else 1.0

    def _all_samples(self, team: Team) -> list[int]:
        """Samples of all workers' batches, as their training steps give them, or else as they were counted."""
        extracted = self._samples() if self._samples is not None else [_UNKNOWN] * team.size
        if self._gives is False:
            if self._given is not None:
                raise MisconfigurationException(
                    f"training_step of rank {team.rank} returns 'batch_size', which it did not with the first batch: "
                    "let it do so with all or with none, on all ranks."
                )
            samples = extracted
        else:  # of the first batch it is not known who gives it
            own = _UNKNOWN if self._given is None else 0 if self.idle else self._given
            given = team.gather(own, _SAMPLES)()
            self._gives = max(given) != _UNKNOWN
            samples = given if self._gives else extracted
        if min(samples) < 0:
            unknown = [rank for rank, number in enumerate(samples) if number < 0]
            raise MisconfigurationException(
                f"weighting='samples' does not find the number of samples of the batch of rank {unknown[0]}: let "
                "training_step return a dict with 'loss' and 'batch_size', on all ranks."
            )
        return samples

    def abandon(self) -> None:
        """Leaves loaders as they were; waits for nobody."""
        for loader in self._loaders:
            loader.release()
        self._loaders, self._team, self._make_team = [], None, None

    def close(self) -> None:
        """Ends the group of all workers as well. May wait for them."""
        team = self._team
        self.abandon()
        if team is not None:
            team.close()


@contextmanager
def uncounted(module: LightningModule) -> Iterator[None]:
    """What a module logs, and its metrics, count nothing of what happens meanwhile."""
    results = module.trainer._results
    logged: Mapping[str, Metric] = {} if results is None else results
    before = {key: _states(each) for key, each in logged.items()}
    metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
    kept = [(metric, _states(metric), _counters(metric)) for metric in metrics]
    yield
    for key, each in logged.items():  # of what is logged for the first time: its beginning
        _set_states(each, before.get(key, each._defaults))
    for metric, states, counters in kept:
        # an empty list that is gathered needs the dtype and the dimensions of the others'
        lists = [name for name, state in states.items() if isinstance(state, list) and not state]
        empty = {name: [part[:0] for part in getattr(metric, name)[:1]] for name in lists}
        _set_states(metric, states | empty)
        vars(metric).update(counters)
    for collection in module.modules():
        if isinstance(collection, MetricCollection):
            collection._state_is_copy = False
            collection._compute_groups_create_state_ref()  # its metrics share their states again


def _states(metric: Metric) -> dict[str, Any]:
    states = {name: getattr(metric, name) for name in metric._defaults}
    return {name: [*state] if isinstance(state, list) else state.detach().clone() for name, state in states.items()}


def _counters(metric: Metric) -> dict[str, Any]:
    """What a metric knows besides its states, such as how often it was updated, and what it has computed."""
    # what was computed first stays: wrappers compute only where nothing is, and that is collective
    left = {*metric._defaults, "_forward_cache", *(() if metric._update_count else ("_computed",))}
    plain = (int, float, Tensor, type(None))
    return {name: value for name, value in vars(metric).items() if name not in left and isinstance(value, plain)}


def _set_states(metric: Metric, states: Mapping[str, Any]) -> None:
    for name, state in states.items():
        setattr(metric, name, state)
