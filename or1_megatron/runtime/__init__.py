"""Services of a run: launcher, restarts, monitor; run folder, metrics and rollouts on disk; logging, seeds, signals."""
