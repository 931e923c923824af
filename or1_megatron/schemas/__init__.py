"""Tables of all fields and metrics that a run writes to disk, with types, units and meanings.

Other programs read these files too. ``python -m tools.schemas_page`` prints docs/schemas.md from these tables.
"""
