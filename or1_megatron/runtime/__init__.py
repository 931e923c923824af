"""Services of a run: launcher, restarts, watchdog; run folder, metrics and rollouts on disk; logging, seeds."""
