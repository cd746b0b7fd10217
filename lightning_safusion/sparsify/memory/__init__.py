"""Error feedback: memories that keep the residual."""
