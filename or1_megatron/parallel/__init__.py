"""Everything Megatron: the mesh, the model, the policy, its schedule, its checkpoints, and the CPU device layer.

This is the only package that imports megatron. ``import or1_megatron.parallel`` first installs the device layer where
there is no CUDA, because Megatron decides some things at import time.
"""

from or1_megatron.parallel.cpu_device import install_without_cuda

install_without_cuda()
