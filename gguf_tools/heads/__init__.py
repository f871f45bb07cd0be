"""The MTP head in a file, other drafters, and draft vocabularies."""
