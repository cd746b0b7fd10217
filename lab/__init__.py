"""Studies: what this package costs, how far its models are from measurements, and what trainings reach.

``python -m lab --help`` lists them; none of it is in the wheel.
"""
