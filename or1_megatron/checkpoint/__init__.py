"""Checkpoints: what is in them, how they are written and loaded, which stay, and those in shared memory."""
