"""Decide what a file contains, before tensor data is read."""
