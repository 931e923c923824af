"""Saves, loads and checks checkpoints (sharded, at any parallel layout), and decides which checkpoints stay."""
