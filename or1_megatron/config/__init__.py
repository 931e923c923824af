"""The configuration: its schema, how YAML files become it, and what each key means."""
