"""Everything that uses Megatron: the mesh, the model, the policy and its schedule, the CPU device layer.

Elsewhere only ``checkpoint.sharded_state`` imports megatron, after this package. Without CUDA,
``import or1_megatron.parallel`` first installs the device layer, because Megatron makes some decisions at import time.
"""

import logging
import os
import warnings

from or1_megatron.parallel.cpu_device import install_without_cuda
from or1_megatron.sizing.parallel_layouts import why_no_transformer_engine

# Megatron warns once per module and process that apex and Transformer Engine are absent; ``or1 doctor`` says it once.
warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine)", module="megatron")
# Its log lines go to the log file; a process without one (``or1 check-parity``) does not print them.
logging.getLogger("megatron").addHandler(logging.NullHandler())
# With a CUDA compiler but no GPU, this logger warns at import.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
# On Hopper Megatron needs a single queue to order the communication of TP and SP against its matrix products.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
why_no_transformer_engine()  # Megatron must not find a broken one
install_without_cuda()
