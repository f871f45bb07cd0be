"""Upstream's sources, converter and quantizer as the tests use them, and the goldens of both."""
