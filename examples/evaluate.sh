#!/usr/bin/env bash
# The report's evaluation of a recipe's last stage: AIME24 and AIME25 avg@32, LiveCodeBench avg@4.
#
#   evaluate.sh RECIPE [arguments of `or1 eval`]
#
# MODEL_OUT  the HF folder to evaluate; by default what the last stage exported     RUNS, EVAL  as for launch.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() { echo "evaluate.sh: $*" >&2; exit 2; }

[[ $# -ge 1 && -f configs/recipes/$1.yaml ]] || die "expected a recipe's name; there are: $(cd configs/recipes && echo *.yaml)"
name=$1
shift
RUNS=${RUNS:-runs} EVAL=${EVAL:-data/eval}
last=$({ find "$RUNS/$name" -maxdepth 1 -name 'stage_*' -type d 2>/dev/null || true; } | sort -V | tail -n 1)
model=${MODEL_OUT:-${last:-$RUNS/$name}/hf}
[[ -f $model/config.json ]] || die "$model holds no config.json; finish the last stage, or set MODEL_OUT"
for set in aime24:32 aime25:32 livecodebench:4; do
  data=$EVAL/${set%:*}.jsonl
  [[ -f $data ]] || die "no $data; expected the evaluation set there (EVAL=$EVAL)"
  or1 eval --model "$model" --data "$data" --k "${set#*:}" --out "$RUNS/$name/evaluation/${set%:*}" "$@"
done
