"""Measures what drafting gains on this machine, and finds the fastest settings.

`run` puts a benchmark together and `tune` a search. `model` holds one copy of the weights, `costs`
and `interleaved` measure, `plan` fits the measurements into a budget, and `analysis` finds the
bottleneck. Nothing here prints.
"""
