"""The head, log-prob and entropy of target tokens without whole logits; and the sampler of the engines' tokens."""
