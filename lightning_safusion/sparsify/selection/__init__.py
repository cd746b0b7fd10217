"""Which elements of a segmented span are selected: one contract (``view``), and who reads a span for it."""
