"""How bytes are written down: checksums and encodings."""
