"""Selection from a span: one contract (``view``) and its backends."""
