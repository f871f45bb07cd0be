"""The class MTPLlama, in layers, and what only it uses."""
