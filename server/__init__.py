"""llama-server: getting its sources, building it with our patches, finding one, running it."""
