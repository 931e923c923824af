"""The paper's ablations, and our own: arms of a run that differ in named keys and in nothing else."""
