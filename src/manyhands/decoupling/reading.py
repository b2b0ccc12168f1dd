"""A traced network read once: which widths must agree, what stands in the way of groups, and why.

Every tensor gets a `Form`: its width, and whether it is a map (sample, channel, places) or flat (sample, channel times
places). An operator that is not understood is refused by name.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from manyhands.decoupling import functions, operators
from manyhands.decoupling.forms import CLASSIFIER, FLATTENED, OUTPUT, PICTURE, Form, WeightedLayer, given, refused
from manyhands.decoupling.tracing import CONVOLUTIONS, makes_tensors, operator_name, shape_of
from manyhands.decoupling.widths import Widths


class Reading:
    """The result of reading: forms, layers, and everything in the graph that must be written anew."""

    def __init__(self, graph: fx.Graph, model: nn.Module, widths: Widths) -> None:
        self.graph = graph
        self.widths = widths
        self.forms: dict[fx.Node, Form] = {}
        self.layers: dict[str, WeightedLayer] = {}
        self.concats: list[fx.Node] = []
        self.reshapes: dict[fx.Node, functions.RewrittenView] = {}
        self.weights: dict[str, tuple[int, int]] = {}
        """Weights that no layer has -> width, and the axis of channels."""
        self.mixing: dict[str, str] = {}
        """Operators that read all channels, besides dense layers: their place -> what they do."""
        self.joins: list[fx.Node] = []
        """Means over maps that are combined with maps."""
        self.gates: set[fx.Node] = set()
        """Nodes made of means over maps, to be combined with maps."""
        self.heads: set[str] = set()
        """Layers that make the network's output."""
        self._model = model
        for node in graph.nodes:
            self._read(node)
        self._find_gates()
        self._pin_classifier()

    def module_of(self, node: fx.Node) -> nn.Module:
        return self._model.get_submodule(str(node.target))

    # One node

    def _read(self, node: fx.Node) -> None:
        if node.op == "output":
            fx.map_arg(node.args, self._leaves)
            return
        if not makes_tensors(node):
            self._aside(node)
            return
        shape = shape_of(node)
        if shape is None:
            raise refused(node, "makes several tensors, which are not followed")
        if node.op == "placeholder":
            width = self.widths.new(shape[1])
            self.widths.pin(width, PICTURE, is_picture=True)
            self.forms[node] = Form(width, is_flat=len(shape) == 2)
        elif node.op == "get_attr":
            pass  # read where it is used
        elif node.op == "call_module":
            self.forms[node] = self._module(node, self.module_of(node))
        else:
            self.forms[node] = self._function(node, shape)

    def _aside(self, node: fx.Node) -> None:
        reads = [source for source in node.all_input_nodes if source in self.forms]
        name = operator_name(node)
        if reads and name not in operators.ASIDE:
            raise refused(node, "makes something that is no tensor, which is not followed")

    def _leaves(self, node: fx.Node) -> fx.Node:
        """Mark a tensor that leaves the network, and return the node that makes it, if nothing is added in between."""
        if node not in self.forms:
            return node
        self.widths.pin(self.forms[node].width, OUTPUT)
        while node.op != "placeholder":
            if node.op == "call_module" and isinstance(self.module_of(node), (*CONVOLUTIONS, nn.Linear)):
                self.heads.add(str(node.target))
                break
            sources = [source for source in node.all_input_nodes if source in self.forms]
            if len(sources) != 1:
                break
            node = sources[0]
        return node

    def _source(self, node: fx.Node) -> fx.Node:
        """Return the one tensor on which a node works."""
        sources = [source for source in node.all_input_nodes if source in self.forms]
        first = node.args[0] if node.args else node.kwargs.get("input")
        if len(sources) != 1 or first is not sources[0]:
            raise refused(node, "reads several tensors" if sources else "works on weights of the network itself")
        return sources[0]

    # Layers

    def _module(self, node: fx.Node, module: nn.Module) -> Form:
        source = self._source(node)
        form = self.forms[source]
        if hasattr(module, "parametrizations") or _is_hooked(module):
            raise refused(node, "has its weights computed by a hook or parametrisation", "Remove it before decoupling.")
        if isinstance(module, CONVOLUTIONS):
            return self._convolution(node, module, form)
        if isinstance(module, nn.Linear):
            return self._linear(node, module, form)
        if operators.is_batch_norm(module) or isinstance(module, (nn.GroupNorm, nn.PReLU, nn.LayerNorm)):
            return self._per_channel(node, module, form)
        if isinstance(module, (nn.Flatten, nn.Unflatten)):
            return functions.reshape(self, node, source)
        if isinstance(module, (nn.PixelShuffle, nn.PixelUnshuffle)):
            down = isinstance(module, nn.PixelUnshuffle)
            factor: int = module.downscale_factor if isinstance(module, nn.PixelUnshuffle) else module.upscale_factor
            return functions.pixels(self, form, factor, down)
        if operators.is_softmax(module):
            return functions.softmax(self, node, source, module.dim)
        if operators.is_local(module):
            return self._local(node, source)
        if not any(True for _ in module.parameters()) and _works_on_each_channel(module, shape_of(source) or ()):
            return form
        raise refused(node, f"is a {type(module).__name__}, which is not understood")

    def _layer(self, node: fx.Node, module: nn.Module, reads: int, makes: int, places: int = 1) -> None:
        layer = self.layers.setdefault(str(node.target), WeightedLayer(module, reads, makes, places))
        layer.calls.append(node)
        self.widths.same(layer.reads, reads)
        self.widths.same(layer.makes, makes)

    def _convolution(self, node: fx.Node, module: Any, form: Form) -> Form:
        if form.is_flat:
            raise refused(node, "is a convolution over numbers that were flattened")
        layer = self.layers.get(str(node.target))
        is_depthwise = module.groups > 1 and module.groups == module.in_channels
        multiple = module.out_channels // module.groups if is_depthwise else 0
        if layer is not None:
            makes = layer.makes
        elif multiple:
            makes = form.width if multiple == 1 else self.widths.scaled(form.width, multiple)
        else:
            makes = self.widths.new(module.out_channels)
        self._layer(node, module, form.width, makes)
        if not is_depthwise:
            shares = math.lcm(module.groups, self.widths.groups)
            self.widths.require(form.width, shares)
            self.widths.require(makes, shares)
        return Form(makes, is_pooled=form.is_pooled)

    def _linear(self, node: fx.Node, module: nn.Linear, form: Form) -> Form:
        if not form.is_flat:
            raise refused(node, "is linear over another axis than the channels", "Flatten the maps before it.")
        if form.places > 1:
            self.widths.pin(form.width, FLATTENED)
        layer = self.layers.get(str(node.target))
        makes = layer.makes if layer is not None else self.widths.new(module.out_features)
        self._layer(node, module, form.width, makes, form.places)
        return Form(makes, is_flat=True, is_pooled=form.is_pooled)

    def _per_channel(self, node: fx.Node, module: Any, form: Form) -> Form:
        """Read a normalisation, or an activation with weights: as wide as what it reads."""
        if isinstance(module, nn.LayerNorm) or (isinstance(module, nn.GroupNorm) and form.is_flat):
            if not form.is_flat:
                raise refused(node, "normalises over all channels and places", "Use nn.GroupNorm or nn.BatchNorm2d.")
            self.widths.pin(form.width, CLASSIFIER)
        elif isinstance(module, nn.GroupNorm):
            self.widths.require(form.width, math.lcm(module.num_groups, self.widths.groups))
        self._layer(node, module, form.width, form.width, form.places)
        return form

    # Functions

    def _function(self, node: fx.Node, shape: tuple[int, ...]) -> Form:
        name = operator_name(node)
        if name in operators.JOINING:
            return functions.join(self, node, shape)
        if name in operators.CONCATENATING:
            return functions.concat(self, node)
        source = self._source(node)
        form = self.forms[source]
        if name in operators.LOCAL:
            return self._local(node, source)
        if name in operators.RESHAPING:
            return functions.reshape(self, node, source)
        if name in operators.REDUCING:
            return functions.reduce(self, node, source)
        if name in operators.SOFTMAX:
            return functions.softmax(self, node, source, given(node, 1, "dim"))
        if name in ("pixel_shuffle", "pixel_unshuffle"):
            down = name == "pixel_unshuffle"
            factor = given(node, 1, "downscale_factor" if down else "upscale_factor")
            return functions.pixels(self, form, factor, down)
        if name == "pad":
            if len(given(node, 1, "pad")) > 2 * (len(shape) - 2):
                raise refused(node, "pads the channels")
            return form
        if name == "getitem":
            return functions.index(self, node, source)
        raise refused(node, "is not understood")

    def _local(self, node: fx.Node, source: fx.Node) -> Form:
        form, before, after = self.forms[source], shape_of(source) or (), shape_of(node) or ()
        if len(before) != len(after) or before[:2] != after[:2]:
            raise refused(node, f"makes {list(after)} of {list(before)}")
        if any(other is not source and makes_tensors(other) for other in node.all_input_nodes):
            raise refused(node, "reads a weight of the network itself")
        kind, places = self._kind(node), math.prod(after[2:])
        if form.is_pooled and places > 1:  # spread over a map again
            self.joins.append(source)
            return Form(form.width)
        pools = "pool" in kind and places == 1 and (math.prod(before[2:]) > 1 or "adaptive" in kind)
        return Form(form.width, form.is_flat, form.places, form.is_pooled or pools)

    def _kind(self, node: fx.Node) -> str:
        return type(self.module_of(node)).__name__.lower() if node.op == "call_module" else operator_name(node)

    # Gates and the classifier

    def _find_gates(self) -> None:
        """Find squeeze and excitation: what lies between means over maps and the maps they are multiplied with."""
        for pooled in self.joins:
            waiting = [pooled]
            while waiting:
                node = waiting.pop()
                if node in self.gates or node not in self.forms or not self.forms[node].is_pooled:
                    continue
                self.gates.add(node)
                waiting += node.all_input_nodes

    def _pin_classifier(self) -> None:
        for layer in self.layers.values():
            over_means = self.forms[layer.calls[0]].is_pooled and isinstance(layer.module, CONVOLUTIONS)
            if (isinstance(layer.module, nn.Linear) or over_means) and not self.gates.intersection(layer.calls):
                self.widths.pin(layer.makes, CLASSIFIER)


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_pre_hooks or module._forward_hooks)


def _works_on_each_channel(module: nn.Module, shape: Sequence[int]) -> bool:
    """Return whether an unknown layer keeps channels apart: tried on numbers, at rest, with another width."""
    resting = copy.deepcopy(module).eval()
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(2, 6, *shape[2:], generator=generator, device="cpu")
    changed = x.clone()
    changed[:, 2] += 1.0
    try:
        before, after = resting(x), resting(changed)
    except Exception:
        return False
    if not isinstance(before, Tensor) or before.shape != x.shape:
        return False
    differs = (before != after).flatten(2).any(2).any(0) if before.dim() > 2 else (before != after).any(0)
    return bool(torch.equal(before, resting(x))) and not bool(differs[[0, 1, 3, 4, 5]].any())
