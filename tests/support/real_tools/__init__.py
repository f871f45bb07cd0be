"""Checkpoints as the field's own tools write them, and what becomes of each."""
