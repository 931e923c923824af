"""How much a decoder layer keeps per token for its backward pass, by kind of recompute."""

from __future__ import annotations

from typing import Literal


def kept_numbers(
    recompute: Literal["none", "selective", "full"], hidden: float, attention: float, mlp_width: float
) -> float:
    """Return how many numbers of the compute dtype one layer keeps per token on one rank.

    none: the residual stream twice, both norms' outputs, what attention keeps, and gate, up and their product;
    selective computes the MLP's three again; full keeps the layer's input. Our own layers keep up to 4 ``hidden`` more,
    measured on CPU in fp32.

    Args:
        hidden: width of the residual stream, divided by TP under sequence parallelism.
        attention: widths of queries, keys, values and attention's output on this rank, added up.
        mlp_width: width of the MLP on this rank; in a mixture, of all experts that compute a token.
    """
    mlp = 3 * mlp_width
    whole = 4 * hidden + attention + mlp
    return {"none": whole, "selective": whole - mlp, "full": hidden}[recompute]
