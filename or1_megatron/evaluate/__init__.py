"""Evaluation on held-out problems (avg@k, pass@k), during training and by ``or1 eval``."""
