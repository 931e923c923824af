"""What every process of a run needs: its folder, its records on disk, logging, seeds, signals."""
