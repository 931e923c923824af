#!/usr/bin/env bash
# One stage of a recipe on one node or several; every node runs this same script. Called by the stage scripts beside it.
#
#   launch.sh RECIPE STAGE [--set KEY=VALUE ..., e.g. --set optimizer.lr=2e-6]
#
# What is where (each is checked first):
#   MODEL        the base model's HF folder                 DATA   folder of the training problems
#   EVAL         folder of the evaluation sets              RUNS   where runs are written; shared by all nodes
#   LAYOUT       a layout's name (`or1 recipes` lists them); the recipe's own if not set
# Nodes:
#   NNODES       how many (1)                               NODE_RANK    this one's number, from 0
#   MASTER_ADDR  name or address of node 0                  MASTER_PORT  of the rendezvous (29500)
#   RAY_PORT     of Ray's head on node 0 (6379)
#   RAY_AUTH_TOKEN_PATH  file of the token that Ray's nodes know each other by ($RUNS/ray_token, made if there is none);
#                RAY_AUTH_MODE=disabled: none
#   DRY_RUN=1    print the plan (`or1 plan`); check and start nothing
#
# Exit status: 0 the stage is done; 3 stopped by a signal, its state saved (run the same again to resume); else failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() { echo "launch.sh: $*" >&2; exit 2; }

[[ $# -ge 2 ]] || die "expected RECIPE and STAGE, e.g. or1_7b 1"
name=$1 stage=$2
shift 2
recipe=configs/recipes/$name.yaml
[[ -f $recipe ]] || die "no recipe $recipe; there are: $(cd configs/recipes && echo *.yaml)"

export NNODES=${NNODES:-1} NODE_RANK=${NODE_RANK:-0} MASTER_PORT=${MASTER_PORT:-29500}
ray_port=${RAY_PORT:-6379}
for variable in MODEL DATA EVAL RUNS; do
  [[ -n ${!variable:-} ]] || die "$variable is not set; see the top of examples/launch.sh"
done
[[ -f $MODEL/config.json ]] || die "MODEL=$MODEL holds no config.json; expected a HF folder, as 'hf download' makes it"
[[ -d $DATA ]] || die "DATA=$DATA is not a folder; expected one with the training problems"
[[ -d $EVAL ]] || die "EVAL=$EVAL is not a folder; expected one with the evaluation sets"
mkdir -p "$RUNS" && [[ -w $RUNS ]] || die "RUNS=$RUNS cannot be written"
[[ -z ${LAYOUT:-} || -f configs/layouts/$LAYOUT.yaml ]] ||
  die "LAYOUT=$LAYOUT: no such file in configs/layouts; there are: $(cd configs/layouts && echo *.yaml)"
[[ $NNODES =~ ^[1-9][0-9]*$ && $NODE_RANK =~ ^[0-9]+$ ]] && ((NODE_RANK < NNODES)) ||
  die "NNODES=$NNODES and NODE_RANK=$NODE_RANK: expected a count and a number below it"
((NNODES == 1)) || [[ -n ${MASTER_ADDR:-} ]] || die "MASTER_ADDR is not set; several nodes meet at node 0's address"

arguments=("$recipe" --set "run.stage=$stage" "$@")
((NNODES == 1)) || arguments+=(--set "cluster.ray_address=$MASTER_ADDR:$ray_port" --set "cluster.nodes=$NNODES")
if [[ ${DRY_RUN:-} == 1 ]]; then
  or1 plan "${arguments[@]}" || exit 2
elif ((NODE_RANK == 0)); then # the others need not read the data too
  or1 train "${arguments[@]}" --check || exit 2
fi
ranks=$(or1 config "${arguments[@]}" --key parallel.ranks)
((ranks % NNODES == 0)) || die "parallel.ranks = $ranks does not divide by NNODES = $NNODES; choose another LAYOUT"
if [[ ${DRY_RUN:-} == 1 ]]; then exit 0; fi

ray_pid="" launcher=""
cleanup() {
  trap '' TERM USR1 INT
  [[ -z $launcher ]] || kill -KILL "$launcher" 2>/dev/null || true
  [[ -z $ray_pid ]] || { kill -TERM "$ray_pid" 2>/dev/null && wait "$ray_pid" 2>/dev/null; } || true
}
trap cleanup EXIT

if ((NNODES > 1)); then
  # Ray's head asks for a token as soon as it finds one anywhere, so all nodes get the same one.
  export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token} RAY_AUTH_TOKEN_PATH=${RAY_AUTH_TOKEN_PATH:-$RUNS/ray_token}
  if [[ $RAY_AUTH_MODE == token && -z ${RAY_AUTH_TOKEN:-} && ! -s $RAY_AUTH_TOKEN_PATH ]] && ((NODE_RANK == 0)); then
    (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$RAY_AUTH_TOKEN_PATH.$$")
    ln "$RAY_AUTH_TOKEN_PATH.$$" "$RAY_AUTH_TOKEN_PATH" 2>/dev/null || true # another job's may be there first
    rm "$RAY_AUTH_TOKEN_PATH.$$"
  fi
  # In a session of its own, ignoring the signals that mean "save": engines must live until the ranks have saved.
  if ((NODE_RANK == 0)); then where=(--head --port "$ray_port"); else where=(--address "$MASTER_ADDR:$ray_port"); fi
  for ((tries = 1; NODE_RANK > 0; tries++)); do # a worker may be there before the head
    (exec 3<>"/dev/tcp/$MASTER_ADDR/$ray_port") 2>/dev/null && break
    ((tries < 300)) || die "no Ray head answers at $MASTER_ADDR:$ray_port; see $RUNS/ray_node_0.log"
    sleep 1
  done
  export RAY_worker_niceness=${RAY_worker_niceness:-0} # Ray's own default of 15 starves engines beside other programs
  log=$RUNS/ray_node_$NODE_RANK.log started=0
  for ((tries = 0; tries < 3 && started == 0; tries++)); do # on a busy machine it may give up
    : >"$log"
    (trap '' USR1 INT HUP; exec setsid ray start "${where[@]}" --block --disable-usage-stats) >"$log" 2>&1 &
    ray_pid=$!
    while ((started == 0)) && kill -0 "$ray_pid" 2>/dev/null; do
      if grep -q "Ray runtime started" "$log"; then started=1; else sleep 1; fi
    done
  done
  ((started)) || die "Ray did not start; see $log"
  arguments+=(--nnodes "$NNODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
fi

stopped=""
pass_on() {
  stopped=$1
  kill -s "$1" "$launcher" 2>/dev/null || true
}
trap 'pass_on TERM' TERM INT HUP
trap 'pass_on USR1' USR1
# It saves and stops when it is told to, and starts the ranks again after what can be mended.
or1 train "${arguments[@]}" &
launcher=$!
[[ -z $stopped ]] || pass_on "$stopped" # a signal that came before
status=0
while :; do # wait returns early when a trapped signal comes
  wait "$launcher" && status=0 || status=$?
  kill -0 "$launcher" 2>/dev/null || break
done
launcher=""
if [[ -n $stopped && $status -ne 0 ]]; then
  echo "launch.sh: stopped by SIG$stopped; run the same again to resume" >&2
  exit 3
fi
exit "$status"
