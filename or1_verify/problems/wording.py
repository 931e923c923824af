"""The texts that prompts have before and after a problem's statement, each with its source.

Scores are comparable with published ones only if every character of the prompt is the same.
"""

from __future__ import annotations

from typing import Final

# LiveCodeBench 28fef95, lcb_runner/prompts/code_generation.py: the question of its style DeepSeekR1, which it gives
# R1 and the R1-Distill models; that of Skywork-OR1 64e96af (verl/utils/reward_score/livecodebench) is the same.
LIVECODEBENCH_OPENING: Final = (
    "You will be given a question (problem specification) and will generate a correct Python program that matches "
    "the specification and passes all tests.\n\nQuestion: "
)
LIVECODEBENCH_WITH_STARTER: Final = (
    "You will use the following starter code to write the solution to the problem and enclose your code within "
    "delimiters."
)
LIVECODEBENCH_STDIN: Final = (
    "Read the inputs from stdin solve the problem and write the answer to stdout (do not directly test on the sample "
    "inputs). Enclose your code within delimiters as follows. Ensure that when the python program runs, it reads the "
    "inputs, runs the algorithm and writes output to STDOUT."
)
LIVECODEBENCH_NO_STARTER: Final = "# YOUR CODE HERE"

# Skywork-OR1 64e96af, or1_data/eval/aime24.parquet: the end of every problem. aime25.parquet's have none.
BOX_INSTRUCTION: Final = " Let's think step by step and output the final answer within \\boxed{}."

# Austin et al., arXiv 2108.07732, section 3: the prompt of MBPP, with the tests below it.
MBPP_OPENING: Final = "You are an expert Python programmer, and here is your task: "
MBPP_TESTS: Final = " Your code should pass these tests:\n\n{}\n"

# Ours, for sets whose publishers give no prompt for a chat model.
READS_STDIN: Final = (
    "\n\nWrite a Python program that reads from standard input and writes to standard output. Put the whole program "
    "into one ```python block."
)
BEGINS_WITH: Final = (
    "\n\nComplete this Python code and put the whole solution into one ```python block:\n\n```python\n{}\n```"
)
COMPLETE: Final = "Complete this Python code and put the whole program into one ```python block.\n\n```python\n"
COMPLETE_END: Final = "\n```"
ONE_BLOCK: Final = "\nPut the whole program into one ```python block."


def livecodebench_instructions(starter: str) -> str:
    """Return the prompt's text after a LiveCodeBench statement; ``starter``: starter code, "" for stdin."""
    asked = LIVECODEBENCH_WITH_STARTER if starter else LIVECODEBENCH_STDIN
    return f"\n\n{asked}\n```python\n{starter or LIVECODEBENCH_NO_STARTER}\n```\n\n"
