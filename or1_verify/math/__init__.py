"""The math verifier: extracts a response's final answer and compares it with the gold answers, in a child process."""
