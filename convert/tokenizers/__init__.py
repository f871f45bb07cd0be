"""Convert tokenizers and chat templates."""
