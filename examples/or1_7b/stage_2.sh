#!/usr/bin/env bash
# 660 steps at T = 32K. The environment it wants: examples/launch.sh. Arguments go to `or1 train`.
exec "$(dirname "$0")/../launch.sh" or1_7b 2 "$@"
