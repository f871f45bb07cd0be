"""Find models on this machine and on the hub, and read them from there."""
