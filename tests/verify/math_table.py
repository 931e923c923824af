r"""Hand-labelled (gold, what follows the reasoning, status). ``right`` is the only status with reward 1.

Each row was labelled from the mathematics before the verifier saw it. The rows stay within what Math-Verify 0.9.0
is known to judge well; its known errors are not recorded here as if they were right. Answers of other kinds are in
tests/data/math_pairs.
"""

from __future__ import annotations

AFTER_THINK: list[tuple[list[str], str, str]] = [
    # plain integers and fractions
    (["42"], r"The answer is $\boxed{42}$.", "right"),
    (["033"], r"\boxed{33}", "right"),
    ([r"\frac{3}{4}"], r"\boxed{3/4}", "right"),
    # arithmetic that was not worked out is no answer to a plain number
    (["35"], r"\boxed{7*(11-(1+5*1))}", "wrong"),
    # several acceptable golds
    (["5", "6"], r"\boxed{6}", "right"),
    (["5", "6"], r"\boxed{7}", "wrong"),
    (["5", r"\sqrt{2}"], r"\boxed{\sqrt{2}}", "right"),
    # boxes: the last one wins, whatever the earlier ones hold
    (["5"], r"\boxed{4}, no: \boxed{5}", "right"),
    (["5"], r"\boxed{5}, no: \boxed{4}", "wrong"),
    (["5"], r"\boxed{5} and then \boxed{", "no_answer"),
    (["5"], r"\boxed{}", "no_answer"),
    (["5"], r"\boxed{5} or \boxed{6} or \boxed{7}", "wrong"),
    (["5"], r"\boxed{\boxed{5}}", "right"),
    (["5"], r"\boxed {5}", "right"),
    (["5"], r"$$\boxed{x = 5}$$", "right"),
    # no box: Math-Verify's own extraction
    (["5"], "The final answer is 5.", "right"),
    (["5"], "The final answer is 6.", "wrong"),
    (["5"], "I cannot solve this.", "no_answer"),
    (["5"], "   \n ", "no_answer"),
    # look-alikes of digits are left to Math-Verify, never to int()
    (["5"], "\\boxed{\u0665\u0666}", "wrong"),
]

WHOLE: list[tuple[list[str], str, bool, str]] = [
    # (golds, whole response, truncated, status)
    (["5"], r"<think>so 5. \boxed{5}", False, "no_answer"),  # reasoning never closed
    (["5"], r"so 5. \boxed{5}", False, "right"),  # a model that marks no reasoning
    (["5"], r"\boxed{5}</think> I am not sure.", False, "no_answer"),  # box inside the reasoning only
    (["5"], r"\boxed{5}</think> \boxed{6}", False, "wrong"),
    (["5"], r"\boxed{6}</think> \boxed{5}", False, "right"),
    (["5"], r"a</think>\boxed{5}", True, "truncated"),
    (["5"], r"a</think> b </think> \boxed{5}", False, "right"),
    (["5"], r"a</think> \boxed{5} <think> hm \boxed{5}", False, "no_answer"),  # reopened, not closed
    (["5"], r"<think>a</think>\boxed{5}", False, "right"),  # a template that does not open it
    (["5"], "", False, "no_answer"),
    (["5"], "", True, "truncated"),
]

HANGS: list[tuple[list[str], str]] = [
    (["z"], r"\boxed{z" + "(" * 3000 + "}"),
    ([r"\oint f"], r"\boxed{f" + "(" * 2500 + "}"),
]
"""For the judge ``math_verify``, whose patterns take minutes."""
