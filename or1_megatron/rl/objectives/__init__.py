"""The objectives, one file each, and what they share. docs/objectives.md has their formulas."""
