#!/usr/bin/env bash
# Makes examples/quickstart_moe/base_model anew; arguments go to the quickstart's make_base.py.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
exec python -m torch.distributed.run --standalone --nproc-per-node 2 examples/quickstart/make_base.py \
    --out examples/quickstart_moe/base_model --experts 8 --steps 1500 "$@"
