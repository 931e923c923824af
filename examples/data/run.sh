#!/usr/bin/env bash
# The data pipeline on the example's sets: made, built, explained. Arguments go to `or1 data build`.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=runs/data_example
python examples/data/make_sets.py --out "$out/sets"
or1 data build examples/data/recipe.yaml "$@"
or1 data why scaled.jsonl:62 --build "$out/build"
