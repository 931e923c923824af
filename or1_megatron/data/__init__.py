"""Training data: reads problem files, applies the chat template, and supplies shuffled prompts without end."""
