"""Compiled kernels for the CPU: operations on every element of a gradient, in as few passes as possible.

They are built with the package where there is a C compiler (``*.c``, ``setup.py``), for GCC and Clang. Without them
NumPy and PyTorch do the same work in more passes, with the same results but for the rounding of sums.

Work is cut into parts, which as many threads share as PyTorch uses. Large results lie in memory that is kept for the
next ones (``empty``); ``release`` gives it back.
"""
# ruff: noqa: F401 - the names of the room

from lightning_safusion.kernels.cpu.elements import (
    MOST_ELEMENTS,
    Added,
    Lists,
    Sums,
    Survey,
    Wanted,
    Weights,
    add_finite,
    follow,
    kth_largest,
    largest,
    survey,
    tail,
    weigh,
)
from lightning_safusion.kernels.cpu.library import (
    FLOAT32,
    Parts,
    empty,
    rearranged,
    release,
    serves,
    unused,
    usable,
    zeros,
)
from lightning_safusion.kernels.cpu.messages import (
    Codes,
    EliasFano,
    Message,
    Outgoing,
    Together,
    check_entries,
    crc32c,
    leaving,
    mark,
    marked,
    mean_by_pieces,
    mean_into,
    number_marked,
    quantize,
    sound,
    take,
    take_out,
    take_out_message,
    values,
    write_elias_fano,
    write_messages,
)
