"""``or1 plan``: predicts the memory, disk space and time of a run before anything starts."""
