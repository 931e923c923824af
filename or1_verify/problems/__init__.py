"""Problems in: rows of our own two layouts and of the published sets, checked strictly."""
