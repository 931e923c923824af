"""Converts HF folders to Megatron checkpoints and back: on a CPU, without a process group, a few buffers at a time.

No tensor is loaded: layouts only move whole rows, so a conversion is a list of byte ranges, from files mapped into
memory to files that are appended to. ``rows`` says which rows go where, ``hf_folder`` and ``megatron_folder`` are the
two sides, ``job`` makes the folder, ``to_megatron`` and ``to_hf`` are the two directions.
"""
