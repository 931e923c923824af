"""MAGIC, without Megatron, vLLM or Ray: rollouts in, mini-batches out, and the loop that orders it all.

loop                           the loop: one step is a list of verbs (``Loop.train_step``)
loop_arguments                 the loop's arguments and its result
supply                         a step's prompts, refill after rejection, rollouts ahead of their step
advantage, penalties           rewards to advantages; rejection; length penalties
score                          pi_k's and the reference's log-probs
entropy                        the estimate e_k and its controller
batch, packing, aggregation    kept groups to mini-batches and packed micro-batches; the weights of token losses
objectives                     one file per loss
stages, plateau                the schedule of stages, and when a stage has converged
evaluations, saving            when to evaluate and to save
metrics, mismatch, alarms      what a step reports, and what looks wrong in it
checks, safety                 what ends a run; SGD steps that are skipped
"""
