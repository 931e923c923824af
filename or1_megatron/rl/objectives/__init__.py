"""The losses (objectives), one file each, and their common parts. docs/objectives.md has their formulas."""
