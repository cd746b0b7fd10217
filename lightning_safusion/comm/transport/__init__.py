"""Transports: the communication libraries behind one interface."""
