"""What a GPU must show, in stages: ``python -m lab gpu --output DIR`` (``docs/gpu.md``)."""
