"""Verifier processes, and the queue in front of them."""
