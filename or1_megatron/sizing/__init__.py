"""Arithmetic on a configuration before it runs: conflicts with the model, memory, disk, parallel layouts."""
