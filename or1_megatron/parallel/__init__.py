"""Everything Megatron: the mesh, the model, the policy, its schedule, its checkpoints, and the CPU device layer.

This is the only package that imports megatron. ``import or1_megatron.parallel`` first installs the device layer where
there is no CUDA, because Megatron decides some things at import time.
"""

import warnings

from or1_megatron.parallel.cpu_device import install_without_cuda

# Megatron warns once per module and process that apex and Transformer Engine are absent; ``or1 doctor`` says it once.
warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine)", module="megatron")
install_without_cuda()
