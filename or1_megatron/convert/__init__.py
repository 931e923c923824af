"""Converts HF folders to Megatron checkpoints and back, on a CPU, without a process group, in little memory.

No tensor is loaded as a whole: the two formats only order a weight's rows differently, so a conversion copies byte
ranges from files mapped into memory. ``rows`` says which rows go where, ``hf_folder`` and ``megatron_folder`` read the
two formats, ``job`` makes the folder, ``to_megatron`` and ``to_hf`` are the two directions.
"""
