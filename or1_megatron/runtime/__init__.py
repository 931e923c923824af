"""Services of a run: launcher, restarts and monitor; run folder, metrics and rollouts on disk; logging, seeds, signals."""
