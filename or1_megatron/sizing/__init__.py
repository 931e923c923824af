"""Arithmetic on a configuration before it runs: memory, disk, parallel layouts, and conflicts with the model."""
