"""Packs tensor slices into messages of bounded size, with checksums."""
