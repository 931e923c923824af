"""Loaders of many habits, recorded on placeholders and then fed with slices, through vLLM's own layerwise reload.

The model is a toy; what real models' loaders do is tried in test_shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from or1_megatron.handoff.buckets import TensorSpec
from or1_megatron.handoff.plan import Want


def put(loader: Callable[[Tensor, Tensor], None], parameter: Tensor) -> nn.Parameter:
    made = nn.Parameter(parameter, requires_grad=False)
    made.weight_loader = loader  # type: ignore[attr-defined]
    return made


def lower_half(param: Tensor, loaded_weight: Tensor) -> None:
    param.data.copy_(loaded_weight.narrow(0, 4, 4))


def one_expert(param: Tensor, loaded_weight: Tensor) -> None:
    param.data.copy_(loaded_weight[1].chunk(2, dim=-1)[1])


def transposed(param: Tensor, loaded_weight: Tensor) -> None:
    param.data.copy_(loaded_weight.t())


def shifted(param: Tensor, loaded_weight: Tensor) -> None:
    param.data.copy_(loaded_weight + 1)


def filled(param: Tensor, loaded_weight: Tensor) -> None:
    param.data.copy_(torch.full_like(param, loaded_weight.sum().item()))


CASES: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...]]] = {
    # loader, shape on the wire, shape of the parameter
    "lower_half": (lower_half, (8, 3), (4, 3)),
    "one_expert": (one_expert, (3, 2, 6), (2, 3)),
    "transposed": (transposed, (2, 5), (5, 2)),
    "shifted": (shifted, (4,), (4,)),
    "filled": (filled, (3,), (2,)),
}


class Toy(nn.Module):
    """A layer per loader, so that each is complete by itself."""

    def __init__(self) -> None:
        super().__init__()
        for name, (loader, _, shape) in CASES.items():
            layer = nn.Module()
            layer.register_parameter("weight", put(loader, torch.full(shape, -1.0)))
            self.add_module(name, layer)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name in CASES:
                parameter = self.get_submodule(name).weight
                parameter.weight_loader(parameter, tensor)


@pytest.fixture(scope="module")
def recorded() -> tuple[Toy, Any, list[TensorSpec]]:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from or1_megatron.handoff.recording import record_wants

    toy = Toy()
    record_metadata_for_reloading(toy)
    specs = [TensorSpec(name, torch.float32, shape) for name, (_, shape, _) in CASES.items()]
    specs.append(TensorSpec("another rank's", torch.float32, (7,)))
    return toy, record_wants(toy, None, specs), specs


def test_what_loaders_ask_for(recorded: Any) -> None:
    """The rest of a tensor is not asked for; what is computed with comes whole, and its name is known."""
    toy, record, specs = recorded
    assert record.wants(specs) == [
        Want("lower_half", ((4, 8), (0, 3))),
        Want("one_expert", ((1, 2), (0, 2), (3, 6))),
        Want("transposed", ((0, 2), (0, 5))),
        Want("shifted", ((0, 4),)),
        Want("filled", ((0, 3),)),
    ]
    assert record.whole.keys() == {"transposed", "shifted", "filled"}
    assert "aten.add" in record.whole["shifted"]
    for parameter in toy.parameters():
        assert (parameter == -1).all()  # nothing was written


def test_loaders_put_received_slices_where_they_would_have_put_them(recorded: Any) -> None:
    """In pieces, as several senders would send them."""
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    from or1_megatron.handoff.recording import Part, SliceLoader
    from or1_megatron.handoff.reload import finish_reload

    toy, record, specs = recorded
    wholes = {spec.name: torch.randn(spec.shape) for spec in specs}
    loader = SliceLoader(record)
    initialize_layerwise_reload(toy)
    for want in record.wants(specs):
        spec = next(spec for spec in specs if spec.name == want.name)
        (start, stop), rest = want.box[0], want.box[1:]
        middle = (start + stop + 1) // 2
        boxes = [((low, high), *rest) for low, high in ((start, middle), (middle, stop)) if low < high]
        parts = [Part(box, wholes[want.name][tuple(slice(*bounds) for bounds in box)].clone()) for box in boxes]
        with loader:
            toy.load_weights([(want.name, loader.offer(spec, parts))])
    with loader:
        finish_reload(toy, None)
    loader.check_complete()
    for name, (load, _, shape) in CASES.items():
        expected = torch.empty(shape)
        load(expected, wholes[name])
        assert torch.equal(toy.get_submodule(name).weight, expected), name


def test_what_was_never_loaded_is_named(recorded: Any) -> None:
    from or1_megatron.handoff.recording import SliceLoader

    with pytest.raises(RuntimeError, match="'lower_half' was received, but its loader never put it"):
        SliceLoader(recorded[1]).check_complete()
