"""Checkpoints written by common tools, and the expected outcome of converting each."""
