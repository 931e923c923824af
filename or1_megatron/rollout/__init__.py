"""Rollouts: samples responses from vLLM engines under Ray, has them verified, and returns them in groups."""
