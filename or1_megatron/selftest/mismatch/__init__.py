"""``or1 doctor mismatch``: finds why engine and policy give different log-probs, by testing one part at a time."""
