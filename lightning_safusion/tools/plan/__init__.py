"""Predictions of systems on a given cluster: traces, a cost library, and an iteration on a clock."""
