"""Compiled kernels for the CPU: what is done to every element of a gradient, in as few passes as there can be.

They are built with the package where there is a C compiler (``*.c``, ``setup.py``), for GCC and
Clang. Without them NumPy and PyTorch do the same work with the same results, but for the rounding of sums, in more
passes.

================= ========================================================== =====================================
function          work                                                       passes over the elements
================= ========================================================== =====================================
``add_finite``    looks for what is not finite, adds a gradient to a memory, 3 (reads both, writes one)
                  and finds sums and what is above a floor then
``survey``        sums, sums of squares, and what is above a floor           1
``largest``,      largest magnitudes; what exceeds limits, and by how much   1
``tail``
``number_above``, counts what was found above other floors, takes it over,   1 to 4, over what was found
``keep_above``,   and cuts it to quotas
``keep_largest``
``mean_into``     decoded mean of sparse messages, zeros included            1 (written past the caches)
``take_out``      subtracts what was sent                                    1, over what was sent
``positions``,    wire formats: positions as offsets in blocks, values as    1, over what was sent
``write_offsets`` codes of a few bits, and back
``quantized``,
``values``
================= ========================================================== =====================================

Work is cut into parts, which as many threads share as PyTorch uses.
"""

from lightning_safusion.native.candidates import keep_above, keep_largest, number_above
from lightning_safusion.native.elements import (
    Added,
    Sums,
    Survey,
    Wanted,
    add_finite,
    largest,
    mean_into,
    survey,
    tail,
    take_out,
)
from lightning_safusion.native.library import Parts, serves, unused, usable
from lightning_safusion.native.messages import positions, quantized, values, write_offsets

__all__ = [
    "Added",
    "Parts",
    "Sums",
    "Survey",
    "Wanted",
    "add_finite",
    "keep_above",
    "keep_largest",
    "largest",
    "mean_into",
    "number_above",
    "positions",
    "quantized",
    "serves",
    "survey",
    "tail",
    "take_out",
    "unused",
    "usable",
    "values",
    "write_offsets",
]
