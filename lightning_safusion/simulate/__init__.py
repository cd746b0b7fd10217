"""What a system would do on a cluster that is not at hand: traces, a cost library, and an iteration on a clock."""
