"""Verdicts: rule-based verifiers of math and code, and the pool of Ray actors that holds them.

Kept free of imports: the math worker, a child process, imports this package and must start fast.
"""
