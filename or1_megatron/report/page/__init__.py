"""The HTML page that shows runs: ``or1 report`` writes it as one file, ``or1 watch`` serves it live."""
