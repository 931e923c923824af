"""Ablations, the paper's and our own: an arm is a set of runs, and arms differ only in named configuration keys."""
