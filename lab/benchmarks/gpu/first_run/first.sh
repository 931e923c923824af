#!/usr/bin/env bash
# The first run of the whole stack on one GPU, in stages that end within ten minutes each; README.md beside this file
# says what each shows and what passes.
#
#   lab/benchmarks/gpu/first_run/first.sh [--out FOLDER] [--tiny] [--print] STAGE ...
#
# v versions, devices, kernels | q1 quickstart in bf16 | e engine alone | l long responses | h handoff and sleep
# h7 the same with a 7B | q32 quickstart in fp32 | s the rest of the self-test
# --out    where runs, models and logs go (runs/first_run); FOLDER/kept.tgz is what to take away.
# --tiny   on a machine without a GPU: tiny shapes in fp32; shows only that the stages' commands work.
# --print  print the stages' commands and run none.
set -uo pipefail
here=lab/benchmarks/gpu/first_run
cd "$(dirname "$0")/../../../.."

usage() { awk 'NR > 1 && /^#/ { sub(/^# ?/, ""); print; next } NR > 1 { exit }' "$0"; }

out="" tiny="" print="" stages=()
while (($#)); do
  case "$1" in
    --out) out=$2; shift 2 ;;
    --tiny) tiny=yes; shift ;;
    --print) print=yes; shift ;;
    -h | --help) usage; exit 0 ;;
    v | q1 | e | l | h | h7 | q32 | s) stages+=("$1"); shift ;;
    *) echo "first.sh: unknown stage or option '$1'; see --help" >&2; exit 2 ;;
  esac
done
((${#stages[@]})) || { usage >&2; exit 2; }

OUT=${out:-runs/first_run}
failed=() short=() shape=1.5B large=7B dtype=bfloat16 tokens=4096 steps="8 4" fewer="4 2" kv_cache=()
if [[ -n $tiny ]]; then
  short=(--set model.dtype=float32 --set stages.0.steps=1 --set stages.0.max_response_tokens=64
    --set rollout.kv_cache_bytes=67108864 --set parallel.threads_per_rank=1 --set verify.workers=1)
  shape=small large=small dtype=float32 tokens=32 steps="1 1" fewer="1 1" kv_cache=(--set rollout.kv_cache_bytes=67108864)
fi
if [[ -z $print ]]; then
  mkdir -p "$OUT/logs" "$OUT/models" "$OUT/runs" && OUT=$(realpath "$OUT")
  export PATH=$PWD/.venv/bin:$PATH
fi
export OUT PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=8 TOKENIZERS_PARALLELISM=false
export VLLM_CACHE_ROOT=$OUT/cache/vllm TRITON_CACHE_DIR=$OUT/cache/triton TORCHINDUCTOR_CACHE_DIR=$OUT/cache/inductor
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 RAY_USAGE_STATS_ENABLED=0 RAY_memory_monitor_refresh_ms=0
# torch refuses a cuDNN older than the one that it was built with unless it is told; the target's own may be older.
export PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK=1
if [[ -z ${BENCHMARK_COMMIT:-} && -f .venv/packed.json ]]; then
  BENCHMARK_COMMIT=$(python3 -c 'import json; print(json.load(open(".venv/packed.json"))["commit"])')
  export BENCHMARK_COMMIT
fi

# stage NAME SECONDS COMMAND ...: run within a limit. Its log is logs/NAME; what matters of it is printed.
stage() {
  local name=$1 limit=$2 started=$SECONDS status
  shift 2
  if [[ -n $print ]]; then printf '%q ' "$@"; echo; return; fi
  timeout -k 20 "$limit" "$@" >"$OUT/logs/$name" 2>&1
  status=$?
  echo "== $name: status $status, $((SECONDS - started)) s" | tee -a "$OUT/logs/summary"
  grep -E '^=>|^(passed|failed|not possible)' "$OUT/logs/$name" | tail -n 40
  if ((status)); then
    failed+=("$name")
    tail -n 25 "$OUT/logs/$name" | cut -c1-300
  fi
  if command -v nvidia-smi >/dev/null; then
    echo "   GPU memory in use now: $(nvidia-smi --query-gpu=memory.used --format=csv,noheader | paste -sd' ')"
  fi
}

data() {
  [[ -f $OUT/data/train.jsonl ]] ||
    stage data 60 python examples/quickstart/task.py --out "$OUT/data" --train 4096 --held-out 128 --seed 1
}

model() { stage model 90 python $here/model.py $shape "$OUT/models/random"; }

engine_check() { # NAME SECONDS MODEL: log-probs against transformers, sleep, handoffs, equal responses after them
  stage "$1" "$2" python $here/engine.py "$3" "$dtype"
}

check() { # NAME MINUTES CHECK ...: checks of the self-test
  local name=$1 minutes=$2
  shift 2
  stage "$name" $((minutes * 60 + 20)) or1 selftest --minutes "$minutes" --out "$OUT/runs/$name" "$@"
}

quickstart() { # NAME SECONDS DTYPE STEPS_OF_STAGE_1 STEPS_OF_STAGE_2 [VARIABLE=VALUE]: colocated, on one device
  local name=$1 limit=$2 type=$3 first=$4 second=$5
  shift 5
  data
  [[ -n $print ]] || rm -rf "$OUT/runs/$name"
  stage "$name" "$limit" env "$@" or1 train examples/quickstart/quickstart.yaml --set run.dir="$OUT/runs/$name" \
    --set run.max_restarts=0 --set model.dtype="$type" --set data.train.0.path="$OUT/data/train.jsonl" \
    --set evaluate.data.0.path="$OUT/data/heldout.jsonl" --set evaluate.every_steps=6 --set evaluate.samples=4 \
    --set stages.0.steps="$first" --set stages.1.steps="$second" --set parallel.ranks=1 --set parallel.pipeline=1 \
    --set parallel.micro_batch_tokens=8192 --set parallel.threads_per_rank=4 --set rollout.engines=1 \
    --set verify.workers=4 --set checkpoint.every_steps=6 --set handoff.probe_every_steps=1 --set track.console=plain
  stage "${name}_shown" 20 python $here/show.py "$OUT/runs/$name"
}

engine() { # NAME SECONDS TOKENS: `or1 eval` of the random model: the engine's start, then 128 responses so long
  [[ -n $print ]] || rm -rf "$OUT/runs/$1"
  stage "$1" "$2" or1 eval --model "$OUT/models/random" --data "$OUT/data/heldout.jsonl" --out "$OUT/runs/$1" --k 1 \
    --set max_response_tokens="$3" --set dtype="$dtype" --set engines.max_concurrent=128 "${kv_cache[@]/rollout/engines}"
  stage "$1_shown" 20 python -c 'import json, sys
print("=> seconds in all:", json.load(open(sys.argv[1]))["wall_s"])' "$OUT/runs/$1/results.json"
}

for name in "${stages[@]}"; do
  case $name in
    v)
      [[ -n $print || -n $tiny ]] || { nvidia-smi -L; nproc; free -g | head -n 2; df -h "$OUT" /dev/shm | tail -n 2; }
      stage versions 120 python -c 'import torch, vllm, vllm.vllm_flash_attn as flash
print("=> torch", torch.__version__, "cuDNN", torch.backends.cudnn.version(), "NCCL", torch.cuda.nccl.version())
print("=> vLLM", vllm.__version__, "FA2", flash.FA2_AVAILABLE, "FA3", flash.FA3_AVAILABLE)'
      check first_checks 4 machine devices kernels
      ;;
    q1) quickstart bf16 280 "$dtype" $steps ;;
    e)
      model
      data
      engine engine_cold 200 16
      engine engine_warm 150 16
      engine engine_long 200 "$tokens"
      engine_check engine_checked 200 "$OUT/models/random"
      ;;
    l)
      model
      data
      stage plan 60 or1 plan $here/long.yaml --gpu h100
      [[ -n $print ]] || rm -rf "$OUT/runs/long"
      stage long 420 or1 train $here/long.yaml "${short[@]}"
      stage long_shown 20 python $here/show.py "$OUT/runs/long"
      stage plan_again 60 or1 plan $here/long.yaml --gpu h100 --lengths "$OUT/runs/long"
      ;;
    h) check handoff_checks 8 handoff sleep ;;
    h7)
      stage model_large 180 python $here/model.py $large "$OUT/models/large"
      engine_check handoff_large 300 "$OUT/models/large"
      [[ -n $print ]] || rm -rf "$OUT/models/large"
      ;;
    q32)
      quickstart fp32 200 float32 $fewer
      quickstart fp32_ieee 200 float32 $fewer TRITON_F32_DEFAULT=ieee
      ;;
    s) check rest 9 layouts checkpoint offload sandbox train ;;
  esac
done
[[ -z $print ]] || exit 0

cat "$OUT/logs/summary"
(cd "$OUT" && find logs runs \( -path '*/checkpoints' -o -path '*/hf' -o -path '*/rollouts' \) -prune -o -type f -size -2M -print0 |
  tar czf kept.tgz --null -T -)
ls -l "$OUT/kept.tgz"
if ((${#failed[@]})); then
  echo "first.sh: failed: ${failed[*]}" >&2
  exit 1
fi
