"""The experiments of SAFusion's slides: what they claim, the command that repeats each, and whether it is reached."""
