"""When buffers are filled and sent: by the plan, at ticks of a clock, or behind a thread of the host that selects."""
