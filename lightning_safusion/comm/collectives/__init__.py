"""Collectives: how the messages of one fusion buffer go round, one file for each way."""
