"""Runs a user's own verifier in a process of its own."""
