"""Trainings that fit two cores: networks, data and optimizers, for the benchmark and the convergence laboratory."""

from lab.tasks.data import Data, Digits, DigitsTwice, Text
from lab.tasks.task import TASKS, Task, evaluate, loss

__all__ = ["TASKS", "Data", "Digits", "DigitsTwice", "Task", "Text", "evaluate", "loss"]
