"""Training a head: the block, collected data, the loop, write-back, the command."""
