"""Trainings that fit two cores: networks, data and optimizers, for the benchmark and the convergence laboratory."""

from lab.tasks.data import Batch, Data, Digits, DigitsTwice, Text
from lab.tasks.table import JUDGES, TASKS, parse_task
from lab.tasks.task import Task, evaluate, loss

__all__ = [
    "JUDGES",
    "TASKS",
    "Batch",
    "Data",
    "Digits",
    "DigitsTwice",
    "Task",
    "Text",
    "evaluate",
    "loss",
    "parse_task",
]
