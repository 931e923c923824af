"""The trainer: the MAGIC recipe on Megatron-Core, with vLLM rollout and Ray."""
