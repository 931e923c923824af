"""How HF folders' tensors become Megatron's, and back, without importing Megatron."""
