"""Views of a run: the console while it trains, figures, and the HTML page."""
