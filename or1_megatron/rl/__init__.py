"""The training algorithm (MAGIC) without Megatron, vLLM or Ray: the loop, advantages, batches, losses and stages."""
