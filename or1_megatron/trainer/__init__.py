"""The processes of the trainer: checks before the start, start of ranks and engines, and the policy over all ranks."""
