"""The GGUF format and the tools on it: reader, writer, listing, FastMTP tables, the CLI."""
