"""Reads rows of problem sets, in our own two column layouts or those of published sets, with strict checks."""
