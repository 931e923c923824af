"""The configuration of a run: its schema, how it is loaded from YAML files, and the explanation of each key."""
