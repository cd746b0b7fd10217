"""What the ``safusion`` command does: plan, bench, report, demo. Training imports none of it."""
