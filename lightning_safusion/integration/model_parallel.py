"""The exchange between replicas of a model that Lightning's ModelParallelStrategy has sharded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.utilities.load import _METADATA_FILENAME
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from typing_extensions import Unpack, override

from lightning_safusion.announce import MisconfigurationException
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.events import Observer
from lightning_safusion.integration.attach import NARROW, Parts, checked_parts
from lightning_safusion.integration.attached import Attached
from lightning_safusion.integration.checkpoint.distributed import load_residuals, save_residuals
from lightning_safusion.integration.checkpoint.parts import ENTRY
from lightning_safusion.integration.history import FitHistory
from lightning_safusion.integration.meeting import MeetingStrategy
from lightning_safusion.integration.parameters import members, params_of, same
from lightning_safusion.integration.readings import EngineReadings
from lightning_safusion.sparsify.schedule import DensitySchedule
from lightning_safusion.systems import DEFAULT

if TYPE_CHECKING:
    from lightning_safusion.integration.sharded import InFSDP

_DIMENSIONS = ("replicate", "shard", "tensor_parallel")


class SAFusionModelParallelStrategy(EngineReadings, MeetingStrategy, ModelParallelStrategy):
    """Lightning's ModelParallelStrategy with replicas between which sparsified gradients are sent.

    ``configure_model`` shards the model over ``self.device_mesh["shard"]`` with ``fully_shard``, and may split layers
    over ``self.device_mesh["tensor_parallel"]`` before. Gradients are summed inside of a replica as FSDP2 does it, and
    their largest elements are exchanged between replicas, which need only a slow link. Workers that have the same part
    of a tensor begin with what the first of them has. Parameters may be frozen and trained again between epochs.

    Args:
        density: Share of the elements to send, in (0, 1], or a schedule; None: one that suits the optimizers.
        system: A scheme by name; one that the engine serves, or ``"hsdp"`` or ``"hsdp-bf16"``: an all-reduce
            between the replicas.
        replicate_size: Number of replicas; ``"auto"``: of machines.
        shard_size: Workers that share one replica's parameters; ``"auto"``: all that are left.
        tensor_parallel_size: Workers that share one layer's computation.
        save_distributed_checkpoint: Write a folder, each worker its own shards and residuals, which any mesh can
            resume; else one file with all of it, which SAFusionStrategy can resume as well.
        process_group_backend: Of torch.distributed; None: the device's.
        timeout: Of collectives.
        log_figures: See :class:`~lightning_safusion.SAFusionStrategy`; of the first sharded model.
        parts: ``compressor`` and the other parts of :func:`~lightning_safusion.attach`.

    Attributes:
        attached: What is below each sharded model; the figures of the strategy are those of the first.
        sizes: The arguments of these names.

    Raises:
        MisconfigurationException: If sizes do not multiply to the number of workers, or a trained parameter is not
            sharded.
        TypeError: If there is no such part.
        ValueError: If a name or number is not one of the possible ones, or the model is sharded over the replicas too.

    Example::

        class Large(LightningModule):
            def configure_model(self):
                for layer in self.model.layers:
                    fully_shard(layer, mesh=self.device_mesh["shard"])
                fully_shard(self.model, mesh=self.device_mesh["shard"])

        Trainer(accelerator="gpu", devices=8, num_nodes=4, strategy=SAFusionModelParallelStrategy())
    """

    def __init__(
        self,
        density: float | DensitySchedule | None = None,
        system: str = DEFAULT,
        replicate_size: Literal["auto"] | int = "auto",
        shard_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: int = 1,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        log_figures: bool = True,
        **parts: Unpack[Parts],
    ) -> None:
        self.settings = checked_parts(system, density, parts, sharded=True).settings
        super().__init__(
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.sizes: dict[str, Any] = {
            "replicate_size": replicate_size,
            "shard_size": shard_size,
            "tensor_parallel_size": tensor_parallel_size,
        }
        self._job = system, density, parts
        self.system, self.log_figures = system, log_figures
        self.attached: list[Attached] = []
        self.cautions = ()
        self._observers: list[Observer] = []
        self._sharded: list[InFSDP] = []  # of those that are attached
        self._members: list[object] = []  # of the optimizers that are bound
        self._trainable: list[Tensor] = []  # parameters, at the latest look
        self._learned: list[Mapping[str, Any]] = []  # by another fit, of each sharded model
        self._history = FitHistory()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Registers the name that ``Trainer(strategy=...)`` takes."""
        if (name := "safusion_model_parallel") not in strategy_registry:
            strategy_registry.register(name, cls, cls.__name__)

    # Setting up

    @override
    def setup_environment(self) -> None:
        self._setup_distributed()
        if self._device_mesh is None:
            self._device_mesh = init_device_mesh(self.root_device.type, self._shape(), mesh_dim_names=_DIMENSIONS)
        if self.lightning_module is not None:
            self.lightning_module._device_mesh = self._device_mesh

    @override
    def _setup_distributed(self) -> None:
        with self._making_groups():
            super()._setup_distributed()

    def _shape(self) -> tuple[int, int, int]:
        replicas, shards, parallel = self.sizes.values()
        if too_small := [f"{name}={size!r}" for name, size in self.sizes.items() if size != "auto" and size < 1]:
            raise MisconfigurationException(f"sizes are numbers of workers, 1 or more, got {', '.join(too_small)}")
        replicas = self.num_nodes if replicas == "auto" else replicas
        shards = self.world_size // (replicas * parallel) if shards == "auto" else shards
        if replicas * shards * parallel != self.world_size:
            raise MisconfigurationException(
                f"replicate_size={replicas}, shard_size={shards} and tensor_parallel_size={parallel} multiply to "
                f"{replicas * shards * parallel}, and there are {self.world_size} workers"
            )
        return replicas, shards, parallel

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        mesh = self.device_mesh
        shards = mesh["shard"].size()
        rank = mesh.get_local_rank("replicate") * shards + mesh.get_local_rank("shard")
        return {"num_replicas": mesh["replicate"].size() * shards, "rank": rank}

    @override
    def setup(self, trainer: Trainer) -> None:
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits:
            _reshard(trainer.lightning_module)  # optimizers are made next
        super().setup(trainer)
        if self.device_mesh["tensor_parallel"].size() > 1:
            from lightning_safusion.integration.sharded import clip_by_norm

            # torch's refuses gradients on meshes of one and of two dimensions
            setattr(self.precision_plugin, "clip_grad_by_norm", clip_by_norm)  # noqa: B010 (it is a method)
        if fits:
            self._attach(trainer.lightning_module)

    def _attach(self, module: nn.Module) -> None:
        from lightning_safusion.integration.sharded import InFSDP, begin_alike_over, sharded_roots

        for each in self.attached:  # of an earlier fit, which could be saved until now
            each.close()
        self.attached.clear()
        self._sharded.clear()
        for number, (name, root) in enumerate(sharded_roots(module)):
            job = checked_parts(*self._job, sharded=True)
            wrapped = InFSDP(root, self.device_mesh["replicate"], name, NARROW.get(job.system.ddp_hook))
            scaler = getattr(self.precision_plugin, "scaler", None)
            attached = Attached(wrapped, job, scaler, self._timeout, self._observers)
            if number < len(self._learned):
                attached.begin_with(self._learned[number])
            self.attached.append(attached)
            self._sharded.append(wrapped)
        self._learned = []
        begin_alike_over(self.device_mesh, module)
        self._bind(module)

    def _bind(self, module: nn.Module) -> None:
        """Exchanges what is trained now, by the optimizers that there are now. Collective."""
        _reshard(module)
        inside = [[*each.module.parameters()] for each in self.attached]
        self._refuse_unsharded(module, [param for params in inside for param in params])
        for each, params in zip(self.attached, inside, strict=True):
            own = set(map(id, params))
            # gradients of a model that none of them has are averaged, if there are any
            if optimizers := [optimizer for optimizer in self.optimizers if own & set(map(id, params_of(optimizer)))]:
                each.bind(optimizers)
                self.settings = each.settings
        self._members, self._trainable = members(self.optimizers), self._find_trainable()
        self.cautions = tuple(caution for each in self.attached for caution in each.cautions)
        if (first := self._first) is not None:
            self._history = first.history

    def _find_trainable(self) -> list[Tensor]:
        return [param for each in self._sharded for param in each.trainable()]

    def _refuse_unsharded(self, module: nn.Module, sharded: Sequence[Tensor]) -> None:
        known = set(map(id, sharded))
        optimized = {id(param) for each in self.optimizers for param in params_of(each)}
        left = [name for name, param in module.named_parameters() if id(param) in optimized - known]
        if left:
            raise MisconfigurationException(
                f"nothing averages the gradients of {', '.join(left[:8])}{', ...' if left[8:] else ''}: in "
                'configure_model call fully_shard(module, mesh=self.device_mesh["shard"]) on a module that has them'
            )

    # A batch

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        known = same(members(self.optimizers), self._members)
        if known and batch_idx == 0:  # parameters are frozen and unfrozen between epochs
            known = same(self._find_trainable(), self._trainable)
        if not known and self.attached and self.lightning_module is not None:
            self._bind(self.lightning_module)

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        if self.attached and self.lightning_module is not None:
            _reshard(self.lightning_module)  # callbacks that freeze, and give optimizers more parameters, come next

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if (module := self.lightning_module) is not None:
            for each in self.attached:
                each.epoch = module.current_epoch
        output = super().training_step(*args, **kwargs)
        if module is not None:
            self._log(module)
        return output

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        """Batches of an accumulation are summed inside of replicas, and exchanged with the last."""
        with ExitStack() as stack:
            for each in self.attached:
                stack.enter_context(each.no_sync())
            yield

    # The end

    @override
    def on_exception(self, exception: BaseException) -> None:
        for each in self.attached:
            each.abandon()
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        if self.attached:
            self._history.ended = self.figures()
        for each in self.attached:
            each.end()
        super().teardown()

    # Checkpoints

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        attached = self.attached if "optimizer_states" in checkpoint else []  # others are of weights alone
        if not self._save_distributed_checkpoint or storage_options is not None:  # which Lightning refuses
            states = [each.state_dict() for each in attached]
            if any(states):
                checkpoint[ENTRY] = states[0] if len(states) == 1 else states
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if self.global_rank == 0:  # before the others come to the broadcast
            _begin_folder(Path(filepath))
        path = Path(self.broadcast(filepath))
        save_residuals(path, attached)
        checkpoint[ENTRY] = len(attached)
        # last: the file that it ends with makes a folder a checkpoint
        super().save_checkpoint(checkpoint, path, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        module = self.lightning_module
        if module is not None and module.trainer.state.fn == TrainerFn.FITTING:  # others need the weights alone
            load_residuals(
                checkpoint.get(ENTRY, 0), Path(self.broadcast(checkpoint_path)), self.attached, self.broadcast
            )
        return checkpoint

    # What can be read

    @override
    def describe(self) -> dict[str, str]:
        shape = zip(_DIMENSIONS, self._shape(), strict=True)
        return super().describe() | {f"{name}_size": f"{size}" for name, size in shape}

    @override
    def learned(self) -> list[Mapping[str, Any]]:
        return [each.learned() for each in self.attached]

    @override
    def begin_with(self, learned: Any) -> None:
        self._learned = list(learned)

    @override
    def figures(self) -> dict[str, Any]:
        """See :meth:`SAFusionStrategy.figures`; bytes and tensors are those of all sharded models."""
        figures = super().figures()
        others = [each.figures() for each in self.attached if each is not self._first and each.engine is not None]
        if self._history.ended is None and figures["bytes_sent"] is not None:
            for key in ("bytes_sent", "bytes_received", "dense_bytes", "tensors", "tensors_missing"):
                figures[key] += sum(each[key] or 0 for each in others)
        return figures

    @property
    def _first(self) -> Attached | None:
        """That of the first sharded model with an engine, or else of the first."""
        return next((each for each in self.attached if each.engine is not None), next(iter(self.attached), None))

    @property
    def engine(self) -> Engine | None:
        """That of the first sharded model that has one, on this rank; None where nothing is exchanged sparse."""
        return None if self._first is None else self._first.engine

    @property
    def _plain_ddp(self) -> str | None:
        return None if self._first is None else self._first.plain_ddp


def _reshard(module: nn.Module) -> None:
    from lightning_safusion.fusion.sharded_hook import resharded  # FSDP2 came with torch 2.6

    resharded(module)


def _begin_folder(path: Path) -> None:
    """Makes room for a checkpoint, and of an earlier one there something that nobody takes for one."""
    if path.is_file():
        path.unlink()
    (path / _METADATA_FILENAME).unlink(missing_ok=True)
    shutil.rmtree(path / ENTRY, ignore_errors=True)
