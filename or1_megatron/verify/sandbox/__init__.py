"""Untrusted programs, each in a sandbox of its own."""
