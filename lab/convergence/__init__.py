"""The convergence laboratory: what compression does to accuracy, scheme by scheme, on tasks that fit two cores.

See ``docs/convergence.md``, or ``python -m lab convergence --help``.
"""
