"""The code verifier: tests, how they run, and how outputs are compared."""
