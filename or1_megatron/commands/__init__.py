"""The `or1` command: one file per subcommand."""
