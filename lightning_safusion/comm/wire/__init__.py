"""Value formats and positions: a selection as bytes of a fixed size."""
