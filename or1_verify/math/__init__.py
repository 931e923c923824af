"""The math verifier, and the process that it judges in."""
