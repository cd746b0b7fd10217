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
``number_above``, counts what was found above other floors, leaves no more   1 to 4, over what was found
``keep_above``,   than that, and cuts it to quotas or to a room for all
``keep_largest``,
``share``
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
next ones (``workspace.py``); ``release`` gives it back.
"""

from lightning_safusion.kernels.cpu.candidates import (
    Lists,
    Shares,
    keep_above,
    keep_largest,
    number_above,
    replaced,
    share,
)
from lightning_safusion.kernels.cpu.elements import (
    MOST_ELEMENTS,
    Added,
    Sums,
    Survey,
    Wanted,
    add_finite,
    largest,
    mean_in_pieces,
    mean_into,
    survey,
    tail,
    take_out,
)
from lightning_safusion.kernels.cpu.library import Parts, serves, unused, usable
from lightning_safusion.kernels.cpu.messages import (
    Codes,
    Message,
    ends_of,
    mark,
    marked,
    number_marked,
    positions,
    quantize,
    take_out_message,
    values,
    write_offsets,
)
from lightning_safusion.kernels.cpu.workspace import rearranged, release, zeros

__all__ = [
    "MOST_ELEMENTS",
    "Added",
    "Codes",
    "Lists",
    "Message",
    "Parts",
    "Shares",
    "Sums",
    "Survey",
    "Wanted",
    "add_finite",
    "ends_of",
    "keep_above",
    "keep_largest",
    "largest",
    "mark",
    "marked",
    "mean_in_pieces",
    "mean_into",
    "number_above",
    "number_marked",
    "positions",
    "quantize",
    "rearranged",
    "release",
    "replaced",
    "serves",
    "share",
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
