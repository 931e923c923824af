"""Weights from the trainer's ranks to the engines.

A module or folder imports only those above it in this list:

    errors                        what a handoff fails with
    probe  backend_check          engine against policy on fixed tokens; which backend runs where
    message                       slices of tensors packed into messages, with checksums
    transport                     how messages travel from rank to rank, and what ranks tell each other
    vllm                          vLLM's loaders and reload, inside its workers
    shard                         every rank sends slices
    gather                        the same connection, with whole tensors from rank 0
    sender                        the trainer's end, whichever the backend
"""
