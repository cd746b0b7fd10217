"""``python -m lab bench``: networks of this package on CPU workers of one machine, over links of a given rate."""
