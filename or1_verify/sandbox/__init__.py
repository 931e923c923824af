"""Runs untrusted programs, each in a sandbox of its own."""
