"""Compiled kernels for the CPU: what is done to every element of a gradient, in as few passes as there can be.

They are built with the package where there is a C compiler (``kernels.c``, ``setup.py``), for GCC and Clang. Without
them NumPy and PyTorch do the same work with the same results, but for the rounding of sums, in more passes.

============== ============================================================= =====================================
function       work                                                          passes over the elements
============== ============================================================= =====================================
``add_finite`` looks for what is not finite, adds a gradient to a memory,    3 (reads both, writes one)
               and finds what is above a floor then
``survey``     sums, sums of squares, and what is above a floor              1
``largest``    largest magnitudes                                            1
``mean_into``  decoded mean of sparse messages, zeros included               1 (written past the caches)
``take_out``   subtracts what was sent                                       1, over what was sent
``positions``, wire formats: positions from offsets, codes of a few bits     1, over what was sent
``codes``,     and back
``values``
============== ============================================================= =====================================

Work is cut into parts, which as many threads share as PyTorch uses.
"""

from lightning_safusion.native.elements import Added, Survey, add_finite, largest, mean_into, survey, take_out
from lightning_safusion.native.library import Parts, serves, unused, usable
from lightning_safusion.native.messages import codes, positions, values

__all__ = [
    "Added",
    "Parts",
    "Survey",
    "add_finite",
    "codes",
    "largest",
    "mean_into",
    "positions",
    "serves",
    "survey",
    "take_out",
    "unused",
    "usable",
    "values",
]
