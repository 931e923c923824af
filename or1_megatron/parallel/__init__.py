"""Everything Megatron: the mesh, the model, the policy, its schedule, its checkpoints, and the CPU device layer.

This is the only package that imports megatron. ``import or1_megatron.parallel`` first installs the device layer where
there is no CUDA, because Megatron decides some things at import time.
"""

import os
import warnings

from or1_megatron.parallel.cpu_device import install_without_cuda

# Megatron warns once per module and process that apex and Transformer Engine are absent; ``or1 doctor`` says it once.
warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine)", module="megatron")
# On Hopper Megatron orders the communication of TP and SP against its products by there being one queue.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
install_without_cuda()
