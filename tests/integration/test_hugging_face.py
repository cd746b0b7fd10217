"""The exchange below Accelerate and below the Trainer of transformers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn

from lightning_safusion.hugging_face import SAFusionKwargs, SAFusionTrainerMixin
from tests.integration.test_attach import SPARSE, Steps, adamw, batches, by_loop
from tests.models import TinyClassifier, equal, weights
from tests.process_group import run_launched


def launched(run: Callable[[int], Any]) -> list[Any]:
    """Runs a function on two workers, as Accelerate finds them."""

    def ranked(rank: int) -> Any:
        os.environ |= {"RANK": str(rank), "ACCELERATE_USE_CPU": "true"}
        return run(rank)

    return run_launched(2, ranked)


class AcceleratedLoop(Steps):
    """A training whose environment a launcher has made."""

    def __init__(self, bind: bool = True, **options: Any) -> None:
        torch.use_deterministic_algorithms(True)
        for state in (AcceleratorState, PartialState, GradientState):
            state._shared_state.clear()
        self.handler = SAFusionKwargs(**(SPARSE | options))
        self.accelerator = Accelerator(cpu=True, kwargs_handlers=[self.handler])
        model = TinyClassifier()
        self.model, self.optimizer = self.accelerator.prepare(model, adamw(model.parameters()))
        self.accelerator.register_for_checkpointing(self.handler)
        if bind:
            self.handler.bind(self.optimizer)

    def step(self, *parts: tuple[Tensor, Tensor]) -> None:
        ((x, y),) = parts
        self.optimizer.zero_grad()
        self.accelerator.backward(nn.functional.cross_entropy(self.model(x), y))
        self.optimizer.step()


def test_accelerate_ends_with_the_parameters_of_a_plain_loop() -> None:
    def accelerated(rank: int) -> tuple[list[Tensor], Any]:
        loop, found = AcceleratedLoop(), AcceleratedLoop(bind=False)
        for batch in batches(rank):
            loop.step(batch)
            found.step(batch)
        assert [each.handler.attached[0].figures()["windows"] for each in (loop, found)] == [20, 19]
        return loop.weights, found.weights

    expected = by_loop()
    (first, found), (second, other) = launched(accelerated)
    assert equal(first, expected)
    assert equal(second, expected)
    assert equal(found, other)


def test_a_checkpoint_of_accelerate_resumes_bit_for_bit(tmp_path: Path) -> None:
    def run(rank: int) -> bool:
        loop, mine = AcceleratedLoop(), batches(rank)
        loop.train(mine[:8])
        loop.accelerator.save_state(str(tmp_path / "saved"))
        loop.train(mine[8:])
        again = AcceleratedLoop()
        again.accelerator.load_state(str(tmp_path / "saved"))
        again.train(mine[8:])
        return equal(loop.weights, again.weights)

    assert launched(run) == [True, True]


def test_one_worker_has_nothing_to_bind() -> None:
    with pytest.warns(UserWarning, match=re.escape("Accelerate has wrapped no model in DDP")):
        SAFusionKwargs().bind(adamw(TinyClassifier().parameters()))


def test_a_model_that_is_prepared_again_is_attached_once() -> None:
    def run(rank: int) -> int:
        loop = AcceleratedLoop()
        module = loop.handler.attached[0].module
        loop.accelerator.free_memory()
        loop.accelerator.prepare(module)
        return len(loop.handler.attached)

    assert launched(run) == [1, 1]


class Words(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences whose first token is the class."""

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(2, 50, (8,), generator=torch.Generator().manual_seed(index))
        tokens[0] = index % 2
        return {"input_ids": tokens, "labels": torch.tensor(index % 2)}


class SparseTrainer(SAFusionTrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """That of a user."""

    safusion = SPARSE


def bert() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForSequenceClassification(config)


def test_the_trainer_of_transformers_trains_and_resumes(tmp_path: Path) -> None:
    def run(rank: int) -> tuple[bool, list[Tensor], Any]:
        torch.use_deterministic_algorithms(True)
        ends = []
        for resumes in (None, str(tmp_path / "run" / "checkpoint-6")):
            arguments = transformers.TrainingArguments(
                str(tmp_path / "run"),
                use_cpu=True,
                per_device_train_batch_size=8,
                max_steps=12,
                save_steps=6,
                logging_steps=100,
                report_to="none",
                disable_tqdm=True,
            )
            trainer = SparseTrainer(model=bert(), args=arguments, train_dataset=Words())
            trainer.train(resume_from_checkpoint=resumes)
            ends.append(weights(trainer.model))
        return equal(*ends), ends[0], trainer.handler.attached[0].figures()["windows"]

    (resumed, first, windows), (_, second, _) = launched(run)
    assert resumed
    assert windows == 11
    assert equal(first, second)


def test_a_scaled_loss_needs_its_scaler() -> None:
    """Accelerate scales a loss on devices alone: its state says so here."""

    def run(rank: int) -> float:
        loop = AcceleratedLoop()
        loop.accelerator.state._mixed_precision = "fp16"
        with pytest.raises(Exception, match=re.escape("set handler.scaler = accelerator.scaler before")):
            loop.accelerator.prepare(TinyClassifier())
        loop.handler.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        model = TinyClassifier()
        prepared, optimizer = loop.accelerator.prepare_model(model), adamw(model.parameters())
        loop.handler.bind(optimizer)
        scaler.scale(prepared(batches(rank)[0][0]).square().mean()).backward()
        engine = loop.handler.attached[-1].engine
        assert engine is not None
        return float(engine.loss_scale())

    assert launched(run) == [64.0, 64.0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"densty": 0.1}, "unexpected keyword argument 'densty'"),
        ({"system": "powersgd"}, "system='powersgd' works without the engine"),
        ({"comm_hook": "fp16"}, "comm_hook='fp16' is another hook"),
    ],
)
def test_what_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match=said):
        SAFusionKwargs(**options)
