"""Head training: states of the trunk that will run, an unrolled MTP block in PyTorch, a new GGUF.

Needs PyTorch, which the extra `mtp-gguf[train]` brings.
"""
