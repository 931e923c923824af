"""Transports of weight handoffs (gloo, shared memory, NCCL, CUDA IPC), their choice, and the ranks' status store."""
