"""``or1 data build``: makes a training set from published problem sets, in steps whose results are cached on disk."""
