"""avg@k and pass@k on held-out problems, while training and by ``or1 eval``."""
