#!/usr/bin/env bash
# The quickstart: problems, two stages of MAGIC on the committed base model, the outcome.
# Arguments go to `or1 train`, e.g. --set run.seed=2 --set run.dir=runs/seed2
set -euo pipefail
cd "$(dirname "$0")/../.."
python examples/quickstart/task.py --out runs/quickstart_data --train 4096 --held-out 256 --seed 1
exec or1 train examples/quickstart/quickstart.yaml "$@"
