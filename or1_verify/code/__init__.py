"""The code verifier: reads tests, runs submissions against them in a sandbox, and compares outputs."""
