"""Parts that every process of a run uses: the run folder, records on disk, logging, seeds, signals, the launcher."""
