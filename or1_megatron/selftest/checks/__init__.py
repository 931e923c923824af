"""The checks: a function for each, which gets a ``Context``, and beside it what its ranks run."""
