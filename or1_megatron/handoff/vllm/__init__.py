"""Code that runs inside vLLM's workers."""
