"""Checks of a model before it is used: its file and weights, a trial, the acceptance rate."""
