"""What travels: slices packed into buckets, with checksums."""
