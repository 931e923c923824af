"""Shows runs and evaluations in the terminal."""
