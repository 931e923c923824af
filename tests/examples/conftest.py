from ranks import rank_server  # noqa: F401
