"""Checkpoints: what is in them, how they are written and loaded, and which stay."""
