"""Reads short final answers by type (number, interval, set, equation, ...) and compares two of them by their types."""
