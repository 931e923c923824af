"""The command line, ``or1``: one file per subcommand."""
