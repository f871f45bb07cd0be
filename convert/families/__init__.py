"""One module per model family, and what they share."""
