"""Writes the new graph and its layers."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from manyhands.decoupling import weights as making
from manyhands.decoupling.forms import WeightedLayer
from manyhands.decoupling.grouping import Grouped, ShuffleCandidate
from manyhands.decoupling.layers import GroupedConcat, GroupShuffle, dealt_order
from manyhands.decoupling.reading import Reading
from manyhands.decoupling.tracing import CONVOLUTIONS
from manyhands.decoupling.widths import Widths


class Rewriting:
    """An editor of the graph that was read; afterwards `parts` has everything that the graph names."""

    def __init__(
        self, model: nn.Module, reading: Reading, widths: Widths, grouped: Mapping[str, Grouped], *, original: bool
    ) -> None:
        self.parts: dict[str, Any] = {}
        self.concats: list[str] = []
        self.shuffles: list[str] = []
        self._model = model
        self._reading = reading
        self._widths = widths
        self._grouped = grouped
        self._original = original
        self._shuffled: set[str] = set()

    def rewrite(self, chosen: Iterable[ShuffleCandidate]) -> None:
        shuffles = [self._shuffle(candidate.convolution) for candidate in chosen]
        for node in self._reading.concats:
            self._concat(node)
        for node in self._reading.reshapes:
            self._reshape(node)
        for node in list(self._reading.graph.nodes):
            if node.meta.get("dropout") is not None:
                self._call(node, "dropout", node.meta["dropout"], node.args[:1])
        for node in self._reading.graph.nodes:
            name = str(node.target)
            if name in self.parts or node.op not in ("call_module", "get_attr"):
                continue
            if name in self._reading.layers:
                self.parts[name] = self._layer(name, self._reading.layers[name])
            elif node.op == "call_module":
                self.parts[name] = copy.deepcopy(self._model.get_submodule(name))
            else:
                self.parts[name] = self._weight(name)
        for shuffle in shuffles:
            self._delay(shuffle)

    # The graph

    def _name(self, stem: str) -> str:
        used_names = {name.partition(".")[0] for name, _ in self._model.named_modules()} | set(self.parts)
        used_names |= set(vars(self._model)) | set(self._model._parameters) | set(self._model._buffers)
        return next(name for number in range(1, 10**6) if (name := f"{stem}_{number}") not in used_names)

    def _call(self, node: fx.Node, stem: str, module: nn.Module, args: tuple[Any, ...]) -> str:
        """Put a call of a layer in the place of a node."""
        name = self._name(stem)
        self.parts[name] = module
        with self._reading.graph.inserting_before(node):
            made = self._reading.graph.create_node("call_module", name, args)
        node.replace_all_uses_with(made)
        self._reading.graph.erase_node(node)
        return name

    def _shuffle(self, convolution: fx.Node) -> fx.Node:
        name = self._name("shuffle")
        self.parts[name] = GroupShuffle(self._widths.groups)
        source = convolution.all_input_nodes[0]
        with self._reading.graph.inserting_before(convolution):
            made = self._reading.graph.create_node("call_module", name, (source,))
        convolution.replace_input_with(source, made)
        self.shuffles.append(name)
        self._shuffled.add(str(convolution.target))
        return made

    def _delay(self, shuffle: fx.Node) -> None:
        """Move what does not need a shuffle (the other branch of a block) before it, up to where the two meet: devices
        compute it while shuffled channels are on their way."""
        after = {shuffle}
        node = shuffle.next
        while node.op not in ("output", "root"):
            following = node.next
            needs = [source in after for source in node.all_input_nodes if source.op != "get_attr"]
            if needs and all(needs):
                after.add(node)
            elif any(needs) or shuffle.all_input_nodes[0] in node.all_input_nodes:
                return
            else:
                shuffle.prepend(node)
            node = following

    def _concat(self, node: fx.Node) -> None:
        if self._widths.groups == 1 or not self._widths.is_grouped(self._reading.forms[node].width):
            return
        parts = node.args[0] if node.args else node.kwargs["tensors"]
        self.concats.append(
            self._call(node, "grouped_concat", GroupedConcat(self._widths.groups), tuple(parts))  # type: ignore[arg-type]
        )

    def _reshape(self, node: fx.Node) -> None:
        """Rewrite a view that may contain old widths."""
        view, form = self._reading.reshapes[node], self._reading.forms[node]
        made, graph = node.all_input_nodes[0], self._reading.graph
        with graph.inserting_before(node):
            if view.unfolded:
                sizes = (self._widths.width(form.width), *view.unfolded)
                made = graph.call_function(torch.unflatten, (made, 1, sizes))
            elif view.axis:
                made = graph.call_function(torch.flatten, (made, view.axis))
        node.replace_all_uses_with(made)
        graph.erase_node(node)

    # Layers and weights

    def _layer(self, name: str, layer: WeightedLayer) -> nn.Module:
        old: Any = layer.module
        made, read = self._widths.origin(layer.makes), self._widths.origin(layer.reads)
        if isinstance(old, CONVOLUTIONS):
            new = _convolution(old, len(read), len(made), self._grouped[name].groups)
        elif isinstance(old, nn.Linear):
            new = _empty(nn.Linear, old, len(read) * layer.places, len(made), bias=old.bias is not None)
        else:
            new = self._per_channel(old, len(made) * layer.places)
        if not self._original:
            making.start_fresh(new)
        elif isinstance(old, CONVOLUTIONS):
            if name in self._shuffled:
                read = [read[channel] for channel in dealt_order(len(read), self._widths.groups)]
            making.take_convolution(new, old, made, read)
        elif isinstance(old, nn.Linear):
            making.take_linear(new, old, made, read, layer.places)
        else:
            making.take_per_channel(new, old, made, layer.places)
        if self._original:
            for weight, original in zip(new.parameters(), old.parameters(), strict=True):
                weight.requires_grad_(original.requires_grad)
        made_layer: nn.Module = new.train(old.training)
        return made_layer

    def _per_channel(self, old: Any, width: int) -> nn.Module:
        """Return a copy with room for other widths, its weights not yet set."""
        groups = old.num_groups if isinstance(old, nn.GroupNorm) else 0
        new: Any = copy.deepcopy(old)
        tensors = dict(old.named_parameters(recurse=False)) | dict(old.named_buffers(recurse=False))
        for name, tensor in tensors.items():
            if tensor.dim() and tensor.shape[0] > 1:
                wider = tensor.new_zeros(width, *tensor.shape[1:])
                setattr(new, name, nn.Parameter(wider) if isinstance(tensor, nn.Parameter) else wider)
        for attribute in ("num_features", "num_channels"):
            if hasattr(new, attribute):
                setattr(new, attribute, width)
        if isinstance(new, nn.PReLU) and new.num_parameters > 1:
            new.num_parameters = width
        if groups and width % self._widths.groups == 0:
            num_groups = math.lcm(groups, self._widths.groups)
            new.num_groups = num_groups if width % num_groups == 0 else groups
        made: nn.Module = new
        return made

    def _weight(self, name: str) -> Any:
        """Return a weight or buffer of the network itself, made for the new widths."""
        path, _, attribute = name.rpartition(".")
        original = getattr(self._model.get_submodule(path), attribute)
        if not isinstance(original, Tensor):
            return copy.deepcopy(original)
        made = original.detach().clone()
        if name in self._reading.weights:
            width, axis = self._reading.weights[name]
            made = making.take_channels(original, self._widths.origin(width), axis)
        return nn.Parameter(made, requires_grad=original.requires_grad) if isinstance(original, nn.Parameter) else made


def _empty(kind: Any, old: Any, *sizes: int, **options: Any) -> Any:
    """Return a layer whose weights are not yet set."""
    where = {"dtype": old.weight.dtype, "device": old.weight.device}
    return nn.utils.skip_init(kind, *sizes, **where, **options)  # type: ignore[no-untyped-call]


def _convolution(old: Any, inputs: int, outputs: int, groups: int) -> Any:
    kind = next(kind for kind in CONVOLUTIONS if isinstance(old, kind))
    options: dict[str, Any] = {
        name: getattr(old, name) for name in ("kernel_size", "stride", "padding", "dilation", "padding_mode")
    }
    if isinstance(old, making.TRANSPOSED):
        options["output_padding"] = old.output_padding
    return _empty(kind, old, inputs, outputs, groups=groups, bias=old.bias is not None, **options)
