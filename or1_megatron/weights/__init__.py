"""The names, memory layouts and cuts that relate HF's tensors to Megatron's; does not import Megatron."""
