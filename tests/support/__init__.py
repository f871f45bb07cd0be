"""Helpers of the tests; tests import them as `support.*`."""
