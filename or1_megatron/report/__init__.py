"""Shows a run: console output while it trains, ``or1 rollouts``, figures, and the HTML page of ``or1 report``."""
