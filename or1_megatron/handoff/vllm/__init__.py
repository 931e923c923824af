"""Code that runs inside vLLM's workers, and vLLM's own backends."""
