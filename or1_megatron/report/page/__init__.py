"""``or1 report``: shows runs as one HTML page."""
