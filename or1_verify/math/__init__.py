"""The math verifier: compares a response's answer (``or1_verify.answer`` extracts it) with the gold answers."""
