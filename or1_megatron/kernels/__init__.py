"""The head: log-prob and entropy of target tokens from hidden states, without whole logits.

head               the functions that the policy calls, with their gradients; a vocabulary cut over ranks
tiled              the work tile by tile; ``tiles_triton`` and ``tiles_torch`` have the epilogues
statistics         four numbers of a token's logits, which merge over tiles and ranks
plan               tile sizes from a budget in bytes
weight_gradient    sums the weight's gradient in fp32
reference          the oracle: plain autograd on whole logits

Also ``sampling``, which draws tokens from the engines' logits; ``sampling_triton`` has its kernel.
"""
