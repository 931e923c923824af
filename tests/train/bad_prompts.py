"""Load the prompts of each configuration given, and print what came of it, as a trainer's rank 0 would."""

from __future__ import annotations

import sys
from pathlib import Path

from or1_megatron.config.load import load_config
from or1_megatron.runtime.log import set_up_logging
from or1_megatron.trainer.prompts import load_prompts
from or1_verify.problems.rows import DataError

config, logs = Path(sys.argv[1]), Path(sys.argv[2])
set_up_logging(logs, 0)
for override in sys.argv[3:]:
    print(f"CASE {override}", flush=True)
    try:
        sources, held_out, abilities = load_prompts(load_config(config, override.split()))
        print(f"{[len(source.prompts) for source in sources]} {len(held_out)} {sorted(abilities)}", flush=True)
    except DataError as error:
        print(f"DataError {error}", flush=True)
