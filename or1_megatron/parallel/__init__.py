"""Everything that uses Megatron-Core: process groups, model, policy, pipeline schedule, and Megatron without CUDA.

Outside this package, only ``checkpoint.sharded_state`` imports megatron, and it imports this package first. Without
CUDA, megatron's import already needs the replacements that this package installs (``cpu_device``).
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
