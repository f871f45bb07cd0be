"""Plugins for other programs. Each is imported by its program, and by nothing in this package."""
