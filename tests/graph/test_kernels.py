"""Every kernel computes what PyTorch's default computes, forward and backward, and leaves the flags alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from manyhands.facts.profile import Kernel
from manyhands.graph import convolution_kernels
from manyhands.graph.capture import capture
from manyhands.graph.convolution_kernels import takes_format
from manyhands.graph.graph import Graph
from manyhands.graph.kernel_flags import Flags
from manyhands.graph.kernels import kernel_calls, packable, store_weights, takes_flags, takes_product
from manyhands.graph.memory_formats import reformat
from manyhands.graph.piece import Context, Piece
from manyhands.graph.tape import bind_inputs
from manyhands.graph.weights import Weights, plain

VARIANTS = [Kernel(channels_last, onednn, threads)
            for channels_last in (False, True) for onednn in (True, False) for threads in (0, 1)]  # fmt: skip
PRODUCT = Kernel(channels_last=True, product=True)
PACKED = Kernel(channels_last=True, packed=True)
VARIANTS += [PRODUCT, PACKED]

CONVOLUTIONS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "plain": (nn.Conv2d(3, 8, 3, padding=1), (3, 9, 7)),
    "no bias": (nn.Conv2d(3, 8, 3, stride=2, bias=False), (3, 9, 7)),
    "pointwise": (nn.Conv2d(4, 6, 1), (4, 5, 5)),
    "pointwise, no bias": (nn.Conv2d(4, 6, 1, bias=False), (4, 5, 5)),
    "a pixel": (nn.Conv2d(4, 6, 1), (4, 1, 1)),
    "pointwise, stride": (nn.Conv2d(4, 6, 1, stride=2), (4, 5, 5)),
    "pointwise, padding": (nn.Conv2d(4, 6, 1, padding=1), (4, 5, 5)),
    "pointwise, groups": (nn.Conv2d(4, 6, 1, groups=2), (4, 5, 5)),
    "grouped": (nn.Conv2d(4, 8, 3, groups=2, padding=(1, 0)), (4, 8, 8)),
    "depthwise": (nn.Conv2d(6, 6, 3, groups=6, padding=1), (6, 8, 8)),
    "dilated": (nn.Conv2d(3, 4, (3, 2), dilation=(2, 1)), (3, 9, 9)),
    "same, odd kernel": (nn.Conv2d(3, 4, 3, padding="same"), (3, 8, 8)),
    "same, even kernel": (nn.Conv2d(3, 4, (4, 2), padding="same", dilation=(1, 3)), (3, 8, 9)),
    "valid": (nn.Conv2d(3, 4, 3, padding="valid"), (3, 8, 8)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1), (4, 5, 6)),
    "transposed, grouped": (nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2, bias=False), (4, 5, 6)),
    "one axis": (nn.Conv1d(3, 5, 3, padding=1), (3, 11)),
    "a volume's points": (nn.Conv3d(2, 4, 1), (2, 5, 6, 4)),
    "volume": (nn.Conv3d(2, 4, 3, padding=1), (2, 5, 6, 4)),
}


class Between(nn.Module):
    """The module between two layers, so that its input has a gradient and its output is changed in place."""

    def __init__(self, inner: nn.Module, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1, channels, *([1] * 1)), 1.5))
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scale.reshape(1, -1, *([1] * (x.dim() - 2)))
        return torch.relu_(self.inner(x * scale)) * 2


def _graph(module: nn.Module, shape: tuple[int, ...]) -> tuple[Graph, torch.Tensor]:
    x = torch.randn(2, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return capture(module, x), x


def _run(graph: Graph, x: torch.Tensor, choice: dict[str, Kernel]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    weights = Weights.copied(graph)
    store_weights(graph, weights, choice)
    piece = Piece(graph, weights, kernels=kernel_calls(graph, choice))
    output = piece(bind_inputs(graph, x), Context(seed=3))[graph.outputs[0]]
    output.backward(torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape))
    return output.detach(), {name: t.grad for name, t in weights.trainable().items() if t.grad is not None}


def _assert_equal(graph: Graph, x: torch.Tensor, choice: dict[str, Kernel]) -> None:
    expected, expected_gradients = _run(graph, x, {})
    found, gradients = _run(graph, x, choice)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(scope="module")
def captured() -> dict[str, tuple[Graph, torch.Tensor]]:
    return {name: _graph(Between(copy.deepcopy(module), shape[0]).double(), shape)
            for name, (module, shape) in CONVOLUTIONS.items()}  # fmt: skip


@pytest.mark.quick(every=66)
@pytest.mark.parametrize("kernel", VARIANTS, ids=str)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_is_the_same_by_every_kernel(captured: dict[str, Any], name: str, kernel: Kernel) -> None:
    graph, x = captured[name]
    chosen = {node.name: kernel for node in graph.nodes if takes_flags(graph, node)}
    assert chosen
    _assert_equal(graph, x, chosen)


def test_products_are_convolutions_of_single_pixels(captured: dict[str, Any]) -> None:
    takes = {name for name, (graph, _) in captured.items() if any(takes_product(graph, node) for node in graph.nodes)}
    assert takes == {"pointwise", "pointwise, no bias", "a pixel", "a volume's points"}


class Seen(TorchDispatchMode):
    """The operators that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **kwargs or {})


@pytest.mark.quick(every=19)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_packed_weight_gives_the_same_and_comes_back_unchanged(captured: dict[str, Any], name: str) -> None:
    module, shape = CONVOLUTIONS[name]
    x = captured[name][1].float()
    graph = capture(Between(copy.deepcopy(module), shape[0]), x)
    choice = {node.name: PACKED for node in graph.nodes if takes_flags(graph, node)}
    weights = Weights.copied(graph)
    store_weights(graph, weights, choice)
    piece = Piece(graph, weights, kernels=kernel_calls(graph, choice))
    context, values = Context(training=False), bind_inputs(graph, x)
    with torch.no_grad():
        expected = Piece(graph, Weights.copied(graph))(values, context)[graph.outputs[0]]
        before = piece(values, context)[graph.outputs[0]]
        piece.rest(2)
        piece.rest(2)  # nothing more happens
        with Seen() as seen:
            found = piece(values, context)[graph.outputs[0]]
    torch.testing.assert_close(before, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    is_packed = bool(packable(graph))
    assert ("mkldnn::_convolution_pointwise" in seen.names) == is_packed
    assert sum(tensor.is_mkldnn for tensor in weights.tensors.values()) == int(is_packed)
    for one, tensor in weights.tensors.items():
        assert torch.equal(plain(tensor), graph.state[one]), one


def test_a_packed_weight_serves_other_shapes_as_it_was() -> None:
    """Changing oneDNN's layout in every call could take a hundred times as long as the convolution."""
    module = nn.Conv2d(4, 8, 3, padding=1)
    graph = capture(module, torch.zeros(2, 4, 9, 9))
    choice = {node.name: PACKED for node in graph.nodes}
    weights = Weights.copied(graph)
    piece = Piece(graph, weights, kernels=kernel_calls(graph, choice))
    with torch.no_grad():
        for laid_out_for, called in ((2, 2), (2, 5), (5, 5), (5, 2)):
            piece.rest(laid_out_for)
            x = torch.randn(called, 4, 9, 9)
            with Seen() as seen:
                found = piece(bind_inputs(graph, x), Context(training=False))[graph.outputs[0]]
            torch.testing.assert_close(found, module(x), rtol=1e-4, atol=1e-5)
            assert ("mkldnn::_convolution_pointwise" in seen.names) == (laid_out_for == called)


def test_what_is_packed(captured: dict[str, Any]) -> None:
    """Pictures, in float32, not transposed, no padding of its own; a weight that two read stays as it is."""
    may = {name for name, (module, shape) in CONVOLUTIONS.items()
           if packable(capture(Between(copy.deepcopy(module), shape[0]), captured[name][1].float()))}  # fmt: skip
    assert may == {name for name, (module, _) in CONVOLUTIONS.items()
                   if isinstance(module, nn.Conv2d)} - {"same, even kernel"}  # fmt: skip
    assert not any(packable(graph) for graph, _ in captured.values())  # float64

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Conv2d(3, 3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(self.inner(x))  # type: ignore[no-any-return]

    assert not packable(capture(Twice(), torch.zeros(2, 3, 9, 9)))


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("has_acl", [False, True], ids=["x86", "aarch64"])
@pytest.mark.parametrize("bias", [False, True])
def test_groups_are_dense_convolutions_where_onednn_has_no_grouped_ones(
    monkeypatch: pytest.MonkeyPatch, has_acl: bool, bias: bool
) -> None:
    """At rest, in channels_last, not depthwise: the same numbers by as many calls as there are groups."""
    monkeypatch.setattr(convolution_kernels, "_has_acl", lambda: has_acl)
    wide = nn.Conv2d(8, 8 * 20, 1)
    module = nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1, groups=4, bias=bias), wide, nn.Conv2d(160, 160, 3, groups=160))
    graph = capture(module, torch.zeros(2, 8, 11, 9))
    choice = {node.name: Kernel(channels_last=True) for node in graph.nodes}
    weights = Weights.copied(graph)
    store_weights(graph, weights, choice)
    piece = Piece(graph, weights, kernels=kernel_calls(graph, choice))
    values = bind_inputs(graph, x := torch.randn(3, 8, 11, 9))
    with torch.no_grad(), Seen() as seen:
        found = piece(values, Context(training=False))[graph.outputs[0]]
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found, module(x), rtol=1e-4, atol=1e-5)
    assert seen.names.count("aten::convolution") == (4 if has_acl else 1) + 2
    with Seen() as seen:
        piece(values, Context())
    assert seen.names.count("aten::convolution") == 3, "in training as PyTorch has it"


def test_a_product_calls_no_convolution_and_nobody_writes_over_it(captured: dict[str, Any]) -> None:
    graph, x = captured["pointwise"]
    choice = {node.name: PRODUCT for node in graph.nodes if takes_flags(graph, node)}
    with Seen() as seen:
        _run(graph, x, choice)
    names = seen.names
    assert not [name for name in names if "convolution" in name]
    assert "aten::relu" in names
    assert "aten::relu_" not in names


@pytest.mark.quick(every=10)
@pytest.mark.parametrize("kernel", VARIANTS, ids=str)
def test_a_frozen_weight_gets_no_gradient(kernel: Kernel) -> None:
    inner = nn.Conv2d(3, 4, 3)
    inner.weight.requires_grad_(False)
    graph, x = _graph(Between(inner, 3).double(), (3, 6, 6))
    _assert_equal(graph, x, {node.name: kernel for node in graph.nodes if takes_flags(graph, node)})


class Mixed(nn.Module):
    """Formats that alternate, a skip connection, a view, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.b = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.c = nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8 * 4 * 4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu_(self.norm(self.a(x)))
        x = self.c(self.b(x)) + x
        x = nn.functional.max_pool2d(x, 2)
        return self.head(x.view(x.shape[0], -1))


@pytest.mark.quick(every=16)
@pytest.mark.parametrize("bits", range(16))
def test_formats_may_alternate_along_a_network(bits: int) -> None:
    graph, x = _mixed()
    tunable = [node.name for node in graph.nodes if takes_flags(graph, node)]
    assert len(tunable) == 4
    _assert_equal(graph, x, {n: Kernel(bool(bits >> i & 1), not bits >> (3 - i) & 1) for i, n in enumerate(tunable)})


def _mixed() -> tuple[Graph, torch.Tensor]:
    if not _MIXED:
        _MIXED.append(_graph(Mixed().double(), (3, 8, 8)))
    return _MIXED[0]


_MIXED: list[tuple[Graph, torch.Tensor]] = []


@pytest.mark.parametrize("onednn", [True, False])
def test_recurrent_layers_run_with_and_without_onednn(onednn: bool) -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 5, batch_first=True, bidirectional=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x)[0]  # type: ignore[no-any-return]

    graph, x = _graph(Reader().double(), (6, 4))
    _assert_equal(graph, x, {n.name: Kernel(onednn=onednn) for n in graph.nodes if takes_flags(graph, n)})


def test_float32_agrees_to_rounding() -> None:
    module = Mixed()
    x = torch.randn(2, 3, 8, 8)
    graph = capture(module, x)
    expected, _ = _run(graph, x, {})
    for kernel in VARIANTS:
        found, _ = _run(graph, x, {n.name: kernel for n in graph.nodes if takes_flags(graph, n)})
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_default_goes_through_no_wrapper() -> None:
    graph, _ = _mixed()
    assert kernel_calls(graph, {}) == {}
    assert kernel_calls(graph, {n.name: Kernel() for n in graph.nodes if takes_flags(graph, n)}) == {}


def test_weights_are_stored_once_in_the_kernels_format() -> None:
    graph, _ = _mixed()
    weights = Weights.copied(graph)
    before = {name: (tensor, tensor.detach().clone()) for name, tensor in weights.tensors.items()}
    choice = {n.name: Kernel(channels_last=True) for n in graph.nodes if takes_format(graph, n)}
    store_weights(graph, weights, choice)
    assert not weights.tensors["a.weight"].is_contiguous()
    assert weights.tensors["a.weight"].is_contiguous(memory_format=torch.channels_last)
    for name, (tensor, values) in before.items():
        assert weights.tensors[name] is tensor
        assert torch.equal(tensor, values)
    store_weights(graph, weights, {})
    assert all(tensor.is_contiguous() for tensor in weights.tensors.values())


def test_a_tensor_in_the_right_format_is_not_copied() -> None:
    x = torch.randn(2, 3, 4, 4)
    assert reformat(x, False) is x
    last = reformat(x, True)
    assert reformat(last, True) is last
    assert torch.equal(last, x)


@pytest.fixture
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _state() -> tuple[bool, int]:
    return torch._C._get_mkldnn_enabled(), torch.get_num_threads()


def _fail_inside(kernel: Kernel, seen: list[tuple[bool, int]]) -> None:
    with Flags(kernel):
        seen.append(_state())
        raise RuntimeError("on purpose")


@pytest.mark.usefixtures("_two_threads")
def test_flags_hold_inside_and_are_restored_even_on_errors() -> None:
    before, seen = _state(), list[tuple[bool, int]]()
    with pytest.raises(RuntimeError, match="on purpose"):
        _fail_inside(Kernel(onednn=False, threads=1), seen)
    assert seen == [(False, 1)]
    assert _state() == before == (before[0], 2)


class _Watch(TorchDispatchMode):
    """Notes the flags under which convolutions run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, tuple[bool, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "convolution" in str(func):
            self.seen[str(func)] = _state()
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("_two_threads")
def test_flags_hold_in_backward_which_runs_later(captured: dict[str, Any]) -> None:
    graph, x = captured["plain"]
    choice = {n.name: Kernel(onednn=False, threads=1) for n in graph.nodes if takes_flags(graph, n)}
    before = _state()
    with _Watch() as watch:
        _run(graph, x, choice)
    assert watch.seen == dict.fromkeys(["aten.convolution.default", "aten.convolution_backward.default"], (False, 1))
    assert _state() == before


@pytest.mark.usefixtures("_two_threads")
def test_flags_are_restored_after_a_failing_convolution() -> None:
    graph, x = _mixed()
    choice = {n.name: Kernel(onednn=False, threads=1) for n in graph.nodes if takes_format(graph, n)}
    piece = Piece(graph, Weights.copied(graph), kernels=kernel_calls(graph, choice))
    before = _state()
    with pytest.raises(RuntimeError):
        piece(bind_inputs(graph, x[:, :2]))
    assert _state() == before


def test_a_frozen_linear_layer_keeps_no_input_for_its_backward_pass() -> None:
    """Only its weight, by which the gradient goes back; a trained one also keeps its input."""
    kept: dict[bool, list[int]] = {}
    for trained in (False, True):
        module = nn.Linear(6, 5)
        module.weight.requires_grad_(trained)
        graph = capture(nn.Sequential(module), torch.randn(3, 6), granularity="operators")
        (node,) = graph.nodes
        weights = Weights.copied(graph)
        piece = Piece(graph, weights, kernels=kernel_calls(graph, {node.name: Kernel(onednn=False)}))
        data = torch.randn(3, 6, requires_grad=True)
        sizes = kept[trained] = []

        def pack(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            (made,) = piece({graph.inputs[0].name: data}).values()
        made.sum().backward()
        torch.testing.assert_close(data.grad, torch.ones(3, 5) @ module.weight.detach())
    assert kept == {False: [30], True: [18, 30]}
