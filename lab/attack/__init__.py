"""Attacks on real jobs: worker processes over gloo on CPUs that lose a worker, a file, a message or a setting."""
