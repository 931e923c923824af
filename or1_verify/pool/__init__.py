"""A pool of verifier processes with a queue, for verdicts on many responses at once."""
