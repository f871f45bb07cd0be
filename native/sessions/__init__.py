"""Session files, folders of them, and checkpoints of earlier prompts."""
