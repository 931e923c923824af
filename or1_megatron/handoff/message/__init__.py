"""Slices packed into messages of bounded size, with checksums."""
