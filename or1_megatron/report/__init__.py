"""Shows a run: console output while it trains, figures, and the HTML page of ``or1 report`` and ``or1 watch``."""
