"""Shows runs, responses and evaluations in the terminal."""
