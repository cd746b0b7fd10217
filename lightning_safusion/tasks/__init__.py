"""Trainings that fit two cores: networks, data and optimizers, for the benchmark and the convergence laboratory."""

from lightning_safusion.tasks.data import Data, Digits, DigitsTwice, Text
from lightning_safusion.tasks.task import TASKS, Task, evaluate, loss

__all__ = ["TASKS", "Data", "Digits", "DigitsTwice", "Task", "Text", "evaluate", "loss"]
