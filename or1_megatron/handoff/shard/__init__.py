"""The `shard` backend: each engine rank receives its own slices."""
