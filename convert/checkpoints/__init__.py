"""Read Hugging Face checkpoints, on disk and on the hub."""
