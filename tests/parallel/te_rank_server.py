"""``rank_server`` with the stand-in for Transformer Engine, which must be there before Megatron is imported."""

import te_stand_in

te_stand_in.install()

import rank_server  # noqa: E402

from or1_megatron.config.schema import ParallelConfig  # noqa: E402
from or1_megatron.parallel import network  # noqa: E402
from or1_megatron.sizing.parallel_layouts import ChosenLayers  # noqa: E402


def without_a_gpu(parallel: ParallelConfig, dtype: str) -> ChosenLayers:
    return ChosenLayers("own" if parallel.layers == "own" else "transformer_engine", "")


if __name__ == "__main__":
    network.choose_layers = without_a_gpu  # type: ignore[assignment]
    rank_server.main()
