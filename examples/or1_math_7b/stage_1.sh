#!/usr/bin/env bash
# 740 steps at T = 8K. The environment it wants: examples/launch.sh. Arguments go to `or1 train`.
exec "$(dirname "$0")/../launch.sh" or1_math_7b 1 "$@"
