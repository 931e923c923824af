"""What a run writes to disk, and the problem files that it reads: every field is named here and nowhere else.

Other programs read these files too. ``python -m tools.schemas_page`` prints docs/schemas.md from these tables.
"""
