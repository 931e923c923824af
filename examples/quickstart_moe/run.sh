#!/usr/bin/env bash
# The quickstart with a mixture of experts: problems, two stages of MAGIC on the committed base model, the outcome.
# Arguments go to `or1 train`, e.g. --set rollout.router_replay=false --set run.dir=runs/without_replay
set -euo pipefail
cd "$(dirname "$0")/../.."
python examples/quickstart/task.py --out runs/quickstart_data --train 4096 --held-out 256 --seed 1
exec or1 train examples/quickstart_moe/quickstart_moe.yaml "$@"
