"""Measuring how a model drafts on this machine: costs, real texts, llama-server beside them.

prompts (what is written) and model (trunk, heads and sessions over one copy of the weights) feed
costs and texts; verdict turns numbers into a limit and a sentence; run puts a bench together and
tune a search. Nothing here prints.
"""
