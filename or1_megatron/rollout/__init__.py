"""Completions from vLLM engines, judged and grouped."""
