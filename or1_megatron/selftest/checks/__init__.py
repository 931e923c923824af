"""The self-test's checks: for each, a function that gets a ``Context``, and the function that its ranks run."""
