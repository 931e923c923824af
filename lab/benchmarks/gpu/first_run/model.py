"""Make a random Qwen2 in bf16 that can be trained on the quickstart's problems: its tokenizer and chat template.

python lab/benchmarks/gpu/first_run/model.py SHAPE FOLDER      # a shape of or1_megatron.selftest.setups
"""

import json
import shutil
import sys
from pathlib import Path

from or1_megatron.selftest.models import random_qwen2
from or1_megatron.selftest.setups import QUICKSTART

shape, target = sys.argv[1], Path(sys.argv[2])
if not (target / "chat_template.jinja").is_file():
    shutil.rmtree(target, ignore_errors=True)
    random_qwen2(shape, target.with_name("made")).rename(target)
    config = json.loads((target / "config.json").read_text()) | {"eos_token_id": 1, "pad_token_id": 0}
    (target / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        shutil.copy(QUICKSTART / "base_model" / name, target)
