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
``kth_largest``   exact k-th largest magnitudes of small runs                3 to 6
``Lists``         counts what was found above other floors, leaves no more   1 to 4, over what was found
                  than that, and cuts it to quotas or to a room for all
``mean_into``,    mean of sparse messages, decoded there, zeros included     1 (written past the caches)
``mean_in_pieces``
``take_out``,     subtracts what was sent                                    1, over what was sent
``take_out_message``
``positions``,    wire formats: positions as offsets in blocks or as a       1, over what was sent, and 2 over bitmaps
``write_offsets`` bitmap, values as codes of a few bits, and back
``marked``,
``mark``
``quantize``,
``values``
================= ========================================================== =====================================

Work is cut into parts, which as many threads share as PyTorch uses. Large results lie in memory that is kept for the
next ones (``empty``); ``release`` gives it back.
"""

from lightning_safusion.kernels.cpu.elements import (
    MOST_ELEMENTS,
    Added,
    Lists,
    Sums,
    Survey,
    Wanted,
    add_finite,
    kth_largest,
    largest,
    survey,
    tail,
)
from lightning_safusion.kernels.cpu.library import Parts, rearranged, release, serves, unused, usable, zeros
from lightning_safusion.kernels.cpu.messages import (
    Codes,
    Message,
    ends_of,
    mark,
    marked,
    mean_in_pieces,
    mean_into,
    number_marked,
    positions,
    quantize,
    take_out,
    take_out_message,
    values,
    write_offsets,
)

__all__ = [
    "MOST_ELEMENTS",
    "Added",
    "Codes",
    "Lists",
    "Message",
    "Parts",
    "Sums",
    "Survey",
    "Wanted",
    "add_finite",
    "ends_of",
    "kth_largest",
    "largest",
    "mark",
    "marked",
    "mean_in_pieces",
    "mean_into",
    "number_marked",
    "positions",
    "quantize",
    "rearranged",
    "release",
    "serves",
    "survey",
    "tail",
    "take_out",
    "take_out_message",
    "unused",
    "usable",
    "values",
    "write_offsets",
    "zeros",
]
