"""What the trainer's ranks run, and what is checked before they start."""
