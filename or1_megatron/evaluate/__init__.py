"""avg@k and pass@k on held-out problems, while training and by ``or1 eval``.

held_out                       during training, with its engines
settings, benchmarks           what is asked; sets known by name, with published scores
sample_and_judge, responses    samples, judges and stores, so that a killed evaluation continues
outcome, intervals             scores with intervals
"""
