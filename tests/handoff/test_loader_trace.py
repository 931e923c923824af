"""Loaders of many habits, traced on placeholders and then fed with slices, through vLLM's own layerwise reload.

The model is a toy; what real models' loaders do is tried in test_to_engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from or1_megatron.handoff.message.checksum import checksum
from or1_megatron.handoff.message.shipment import ReceivedSlice
from or1_megatron.handoff.message.slices import Slice, Slot, whole_tensor


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


def padded(param: Tensor, loaded_weight: Tensor) -> None:
    param.data[:2].copy_(loaded_weight)
    param.data[2:].fill_(0)


def doubled_in_place(param: Tensor, loaded_weight: Tensor) -> None:
    param.data.copy_(loaded_weight)
    param.data.copy_(2 * param.data)


CASES: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...]]] = {
    # loader, shape on the wire, shape of the parameter
    "lower_half": (lower_half, (8, 3), (4, 3)),
    "one_expert": (one_expert, (3, 2, 6), (2, 3)),
    "transposed": (transposed, (2, 5), (5, 2)),
    "shifted": (shifted, (4,), (4,)),
    "filled": (filled, (3,), (2,)),
    "padded": (padded, (2, 2), (3, 2)),
    "doubled_in_place": (doubled_in_place, (3,), (3,)),
}
COPIED_DIRECTLY = {"lower_half", "one_expert"}


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
def traced() -> tuple[Toy, Any]:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from or1_megatron.handoff.vllm.loader_trace import trace_loaders

    toy = Toy()
    record_metadata_for_reloading(toy)
    tensors = [whole_tensor(name, torch.float32, shape) for name, (_, shape, _) in CASES.items()]
    tensors.append(whole_tensor("another rank's", torch.float32, (7,)))
    return toy, trace_loaders(toy, None, tensors)


def test_what_loaders_ask_for(traced: Any) -> None:
    """The rest of a tensor is not asked for; what is computed with comes whole, and its name is known."""
    toy, trace = traced
    assert trace.wants() == [
        Slice("lower_half", ((4, 8), (0, 3)), torch.float32),
        Slice("one_expert", ((1, 2), (0, 2), (3, 6)), torch.float32),
        Slice("transposed", ((0, 2), (0, 5)), torch.float32),
        Slice("shifted", ((0, 4),), torch.float32),
        Slice("filled", ((0, 3),), torch.float32),
        Slice("padded", ((0, 2), (0, 2)), torch.float32),
        Slice("doubled_in_place", ((0, 3),), torch.float32),
    ]
    assert trace.whole.keys() == {"transposed", "shifted", "filled"}
    assert "aten.add" in trace.whole["shifted"]
    for parameter in toy.parameters():
        assert (parameter == -1).all()  # nothing was written


def in_pieces(box: Any) -> list[Any]:
    """As several senders would send it."""
    (start, stop), rest = box[0], box[1:]
    middle = (start + stop + 1) // 2
    return [((low, high), *rest) for low, high in ((start, middle), (middle, stop)) if low < high]


def cut_out(tensor: Tensor, box: Any) -> Tensor:
    return tensor[tuple(slice(*bounds) for bounds in box)].clone()


def arrived(part: Slice, values: Tensor) -> ReceivedSlice:
    flat = values.view(torch.uint8).flatten()
    return ReceivedSlice(Slot(part, 0, part.size_bytes), flat, checksum(part, flat, 1), 0, 1)


def assert_loaded(toy: Toy, wholes: dict[str, Tensor]) -> None:
    for name, (load, _, shape) in CASES.items():
        expected = torch.empty(shape)
        load(expected, wholes[name])
        assert torch.equal(toy.get_submodule(name).weight, expected), name


def pieces_of(trace: Any) -> list[Slice]:
    return [Slice(want.name, box, torch.float32) for want in trace.wants() for box in in_pieces(want.box)]


def test_loaders_put_received_slices_where_they_would_have_put_them(traced: Any) -> None:
    """All of them through the loaders, in rounds of three slices, after which the messages' memory is overwritten."""
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    from or1_megatron.handoff.vllm.loader_trace import SliceLoader
    from or1_megatron.handoff.vllm.reload import finish_reload

    toy, trace = traced
    wholes = {name: torch.randn(tensor.shape) for name, tensor in trace.tensors.items()}
    pieces = pieces_of(trace)
    loader = SliceLoader(trace, pieces)
    initialize_layerwise_reload(toy)
    for first in range(0, len(pieces), 3):
        round_ = [arrived(piece, cut_out(wholes[piece.name], piece.box)) for piece in pieces[first : first + 3]]
        messages = [received.message for received in round_]
        for received in round_:
            loader.take(received)
        loader.load(toy)
        for message in messages:
            message.zero_()
    with loader:
        finish_reload(toy, None)
    loader.check_complete()
    assert_loaded(toy, wholes)


def test_parts_of_an_expert_come_as_slices() -> None:
    """The second half of an expert's entries, transposed as vLLM's gpt-oss does; test_to_engines loads such slices."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from or1_megatron.handoff.vllm.loader_trace import trace_loaders

    class Expert(nn.Module):
        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            for name, tensor in weights:
                half = tensor.chunk(2, dim=1 if name == "mlp.experts.1.gate_up_proj" else 0)[1]
                self.get_parameter(name.split(".")[-1]).data.copy_(half.t().contiguous())

    model, stacks = Expert(), "mlp.experts."
    model.register_parameter("gate_up_proj", nn.Parameter(torch.empty(4, 3)))
    model.register_parameter("down_proj", nn.Parameter(torch.empty(3, 2)))
    record_metadata_for_reloading(model)
    parts = {"gate_up_proj[1, 0::2]": (4, 3), "gate_up_proj[1, 1::2]": (4, 3), "down_proj[1, 0::1]": (3, 4)}
    trace = trace_loaders(model, None, [whole_tensor(stacks + at, torch.float32, shape) for at, shape in parts.items()])
    wanted = [((2, 4), (0, 3)), ((2, 4), (0, 3)), ((0, 3), (2, 4))]
    assert [(want.name, want.box) for want in trace.wants()] == list(zip(trace.tensors, wanted, strict=True))


def test_slices_are_copied_directly_where_loaders_only_copy(traced: Any) -> None:
    """And the rest goes through its loaders, in the same handoff; twice."""
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    from or1_megatron.handoff.vllm.direct_copy import DirectCopy
    from or1_megatron.handoff.vllm.loader_trace import SliceLoader
    from or1_megatron.handoff.vllm.reload import finish_reload

    toy, trace = traced
    pieces = pieces_of(trace)
    direct_copy = DirectCopy(toy, trace, pieces)
    assert direct_copy.names == COPIED_DIRECTLY
    for _ in range(2):
        wholes = {name: torch.randn(tensor.shape) for name, tensor in trace.tensors.items()}
        loader = SliceLoader(trace, [piece for piece in pieces if piece.name not in direct_copy.names])
        initialize_layerwise_reload(toy)
        direct_copy.begin()
        for piece in pieces:
            received = arrived(piece, cut_out(wholes[piece.name], piece.box))
            if piece.name in direct_copy.names:
                direct_copy.copy(received)
                received.message.zero_()  # as a message's memory is used again
            else:
                loader.take(received)
        loader.load(toy)
        with loader:
            finish_reload(toy, None)
        direct_copy.check_complete()
        loader.check_complete()
        assert_loaded(toy, wholes)


def test_a_slice_that_is_not_what_was_sent_is_not_copied(traced: Any) -> None:
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    from or1_megatron.handoff.failures import SliceMismatch
    from or1_megatron.handoff.vllm.direct_copy import DirectCopy
    from or1_megatron.handoff.vllm.reload import put_back

    toy, trace = traced
    part = next(want for want in trace.wants() if want.name == "lower_half")
    before = toy.get_submodule("lower_half").weight.clone()
    direct_copy = DirectCopy(toy, trace, [part])
    initialize_layerwise_reload(toy)
    direct_copy.begin()
    received = arrived(part, torch.ones(4, 3))
    received.message[17] ^= 1
    with pytest.raises(SliceMismatch, match=r"'lower_half'.* did not arrive as it was sent"):
        direct_copy.copy(received)
    put_back(toy, None)
    assert torch.equal(toy.get_submodule("lower_half").weight, before)


def test_layer_that_lacks_a_slice_is_named(traced: Any) -> None:
    from or1_megatron.handoff.vllm.direct_copy import DirectCopy

    toy, trace = traced
    direct_copy = DirectCopy(toy, trace, trace.wants())
    direct_copy.begin()
    with pytest.raises(RuntimeError, match="'lower_half' of the engine's model lacks 1 of 1 slices"):
        direct_copy.check_complete()


class Pair(nn.Module):
    """One layer that takes up two tensors."""

    def __init__(self, one: Any, other: Any) -> None:
        super().__init__()
        self.layer = nn.Module()
        self.layer.register_parameter("one", put(one, torch.zeros(3)))
        self.layer.register_parameter("other", put(other, torch.zeros(3)))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            parameter = getattr(self.layer, name)
            parameter.weight_loader(parameter, tensor)


def copied(param: Tensor, loaded_weight: Tensor) -> None:
    param.data.copy_(loaded_weight)


PACKED = ("up", "down")


class Packs(nn.Module):
    """Three layers: one computes with its weight, two, as vLLM's linear layers on CPU, with packed copies alone."""

    def __init__(self) -> None:
        from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

        class UnquantizedLinearMethod(QuantizeMethodBase):
            def create_weights(self, *args: Any, **kwargs: Any) -> None: ...

            def apply(self, *args: Any, **kwargs: Any) -> Any: ...

            def process_weights_after_loading(self, layer: Any) -> None:
                layer.packed = layer.weight.t().contiguous()
                layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)

        super().__init__()
        for name in ("norm", *PACKED):
            layer: Any = nn.Module()
            layer.register_parameter("weight", put(copied, torch.full((4, 2), -1.0)))
            if name in PACKED:
                layer.quant_method = UnquantizedLinearMethod()
            self.add_module(name, layer)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            parameter = self.get_submodule(name).weight
            parameter.weight_loader(parameter, tensor)


def test_a_layer_is_filled_in_place_where_its_weight_stays_what_was_loaded() -> None:
    """Half way the model's own tensor of such a layer holds what has come; the other layers are still whole, and old.

    All are right in the end, twice. Which of vLLM's layers are of which kind is not shown here.
    """
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload, record_metadata_for_reloading

    from or1_megatron.handoff.vllm.direct_copy import DirectCopy
    from or1_megatron.handoff.vllm.loader_trace import trace_loaders
    from or1_megatron.handoff.vllm.reload import finish_reload

    model = Packs()
    record_metadata_for_reloading(model)
    packed = {name: model.get_submodule(name) for name in PACKED}
    for layer in packed.values():
        layer.quant_method.process_weights_after_loading(layer)
    own, shapes = model.norm.weight, dict.fromkeys(("norm", *PACKED), (4, 2))
    trace = trace_loaders(model, None, [whole_tensor(name, torch.float32, shape) for name, shape in shapes.items()])
    pieces = pieces_of(trace)
    direct_copy = DirectCopy(model, trace, pieces)
    assert direct_copy.names == shapes.keys()
    for _ in range(2):
        old, old_packed = own.clone(), {name: layer.packed.clone() for name, layer in packed.items()}
        wholes = {name: torch.randn(shape) for name, shape in shapes.items()}
        initialize_layerwise_reload(model)
        direct_copy.begin()
        for half in (0, 1):
            for piece in pieces[half::2]:
                direct_copy.copy(arrived(piece, cut_out(wholes[piece.name], piece.box)))
            if half == 0:
                assert torch.equal(own, torch.cat([wholes["norm"][:2], old[2:]]))
                assert all(torch.equal(layer.packed, old_packed[name]) for name, layer in packed.items())
        finish_reload(model, None)
        assert model.norm.weight is own and torch.equal(own, wholes["norm"])
        for name, layer in packed.items():
            assert torch.equal(layer.packed, wholes[name].t()) and not layer.weight.numel()


def copied_elsewhere_too(param: Tensor, loaded_weight: Tensor) -> None:
    param.data.copy_(loaded_weight)
    torch.empty(3, device="meta").copy_(loaded_weight)


def added(param: Tensor, loaded_weight: Tensor) -> None:
    param.data.copy_(loaded_weight + 0)


@pytest.mark.parametrize(
    ("other", "direct"), [(copied, {"one", "other"}), (copied_elsewhere_too, set()), (added, set()), (padded, set())]
)
def test_layer_is_copied_directly_whole_or_not_at_all(other: Any, direct: set[str]) -> None:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from or1_megatron.handoff.vllm.direct_copy import copied_directly
    from or1_megatron.handoff.vllm.loader_trace import trace_loaders

    pair = Pair(copied, other)
    record_metadata_for_reloading(pair)
    shapes = {"one": (3,), "other": (2,) if other is padded else (3,)}
    trace = trace_loaders(pair, None, [whole_tensor(name, torch.float32, shape) for name, shape in shapes.items()])
    assert copied_directly(pair, trace) == direct
    pair.layer.quant_method = object()  # of a kind that is not known to load by copying
    assert copied_directly(pair, trace) == set()


def test_what_was_never_loaded_is_named(traced: Any) -> None:
    from or1_megatron.handoff.vllm.loader_trace import SliceLoader

    with pytest.raises(RuntimeError, match="'doubled_in_place' was received, but its loader never put it"):
        SliceLoader(traced[1], traced[1].wants()).check_complete()
