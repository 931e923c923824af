"""The fused head (log-probs and entropies without all logits in memory), and the engines' token sampler."""
