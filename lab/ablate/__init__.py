"""Ablations of the paper and of our own: runs whose arms differ only in named config keys."""
