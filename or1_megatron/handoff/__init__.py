"""Weights from the trainer's ranks to the engines.

A module or folder imports only those above it in this list:

    failures                      a handoff's errors
    probe                         compares engines and policy on fixed tokens
    message                       slices of tensors packed into messages, with checksums
    transport                     how messages travel from rank to rank, and what ranks tell each other
    send_plan                     who sends what to whom
    transfer                      a rank's part in a handoff
    sender                        the trainer's end
    vllm                          the engines' end, inside vLLM's workers: loaders, reload, checks
"""
