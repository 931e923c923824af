"""Programs that run inside a sandbox, given to it as text. Standard library only; nothing here is imported by us."""
