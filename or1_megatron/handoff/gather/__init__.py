"""The `gloo` backend: gather each tensor, then broadcast it to the engines."""
