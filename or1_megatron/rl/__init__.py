"""MAGIC, without Megatron, vLLM or Ray: rollouts in, mini-batches out, and the loop that orders it all."""
