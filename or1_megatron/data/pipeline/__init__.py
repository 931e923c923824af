"""From published problem sets to a training set, step by step: each step's result is on disk, cached and explained."""
