"""Surgery on GGUF files: graft, extract, strip, draft vocabularies, doctor, compare, remote."""
