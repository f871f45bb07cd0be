"""GBNF grammars of JSON schemas."""
