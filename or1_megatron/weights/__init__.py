"""How HF folders' tensors become Megatron's, and back, without importing Megatron.

table, families      one table per model family; ``decoder`` and one file per family have the rows
layout               fusing and splitting of whole tensors: QKV, gate and up
slicing, holdings    cuts over tensor-parallel ranks; which rank holds which part
files                checks of an HF folder's weight files
shape, rope          the sizes of a model; its rotary embeddings
"""
