"""The head: log-prob and entropy of target tokens from hidden states, without whole logits."""
