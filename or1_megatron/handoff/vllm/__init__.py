"""The engines' side of a weight handoff, inside vLLM's workers: receives slices, loads and checks them."""
