#!/usr/bin/env bash
# Makes examples/quickstart/base_model anew; arguments go to make_base.py, e.g. --out DIR --seed 1.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
exec python -m torch.distributed.run --standalone --nproc-per-node 2 examples/quickstart/make_base.py \
    --out examples/quickstart/base_model "$@"
