"""The end of a window: messages are awaited, means written into gradients, and what was sent leaves the residual."""
