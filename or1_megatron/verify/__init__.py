"""Verdicts: rule-based verifiers of math and code, and the pool of processes that holds them.

This file imports nothing: the math worker, a child process, imports the package and must start fast.
"""
