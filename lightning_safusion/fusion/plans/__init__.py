"""Plans: which tensors share a buffer. Pure: numbers in, a plan out; nothing of the engine, no torch, no clock."""
