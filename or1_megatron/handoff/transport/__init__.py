"""How messages travel: gloo, shared memory, NCCL, CUDA IPC."""
