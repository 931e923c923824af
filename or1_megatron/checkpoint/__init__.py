"""Checkpoints: saves, loads and checks them (sharded, at any parallel layout), and decides which of them stay."""
