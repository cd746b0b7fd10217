"""``safusion bench``: systems measured side by side, over links of a given rate."""
