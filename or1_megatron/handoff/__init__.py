"""Weight handoff (weight sync): sends the policy's weights from the trainer's ranks to the engines after every step.

A module or folder imports only modules above it in this list:

    failures                      errors of a handoff
    probe                         compares log-probs of engines and policy on fixed tokens
    message                       slices of tensors packed into messages, with checksums
    transport                     moves messages from rank to rank, and shares the ranks' status
    send_plan                     plans which rank sends which slices to which rank
    transfer                      sends and receives a rank's messages
    sender                        the trainer's side
    vllm                          the engines' side, inside vLLM's workers: loaders, reload, checks
"""
