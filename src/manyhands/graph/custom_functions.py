"""Custom `torch.autograd.Function`s, captured with their own backward.

torch.export records what a function's forward computes and forgets that it has a backward of its own. While a module
is exported, this file writes each call in operators that have the right gradient instead. Let the function compute
y from x, and let its backward be linear in the incoming gradient g: B(g) = Jᵀg, for some J that may depend on x. Then

    y  =  forward(x)  +  J · (x - x.detach())
          no gradient     zero in value, and its gradient is Jᵀg = B(g)

J · v is the derivative of <B(g), v> with respect to g, so autograd writes it down. Straight-through estimators,
gradient reversal and scaling, surrogate gradients and hand-written backwards of ordinary functions are all linear in g.
One that is not (clipping g, say) still reads g in what is left of the graph: convert.py finds that and refuses it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import function as autograd_function
from torch.nn.modules._functions import BackwardHookFunction

from manyhands.facts.errors import CaptureFailed
from manyhands.graph.sizes import at
from manyhands.graph.unsupported import refuse_tensor_hook

INCOMING = 2.0**-77
"""Stand-ins for an incoming gradient are filled with this number, which no user writes: convert.py looks for it."""


@contextmanager
def with_gradients(met: list[str]) -> Iterator[None]:
    """Write custom functions, within this context, in operators that have their gradients. The names of those
    that were called are added to `met`.

    `Function.apply` is often bound to a name long before (`reverse = Reverse.apply`), so it is the method which `apply`
    itself calls on its base class that is replaced.
    """
    base: Any = autograd_function._SingleLevelFunction
    assert "apply" not in base.__dict__, "tracing inside tracing"

    def apply(function: Any, *arguments: Any, **options: Any) -> Any:
        if function is BackwardHookFunction:  # torch's own, around a module with backward hooks: it changes nothing
            return super(base, function).apply(*arguments)
        met.append(function.__name__)
        return _applied(function, arguments, options)

    register_hook = torch.Tensor.register_hook
    base.apply = classmethod(apply)
    torch.Tensor.register_hook = refuse_tensor_hook  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]
        del base.apply


class _Context:
    """The `ctx` of a function: it holds whatever the function's forward writes on it, and what torch's own offers."""

    saved_tensors: tuple[Any, ...] = ()
    materialize_grads = True

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.constant: set[int] = set()
        self.dirty = False

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        """Do nothing: forward-mode derivatives are not used in training."""

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        self.constant.update(map(id, tensors))

    def mark_dirty(self, *tensors: torch.Tensor) -> None:
        self.dirty = True

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize_grads = value


def _applied(function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    needs = tuple(_needs_gradient(argument) for argument in arguments)
    context = _Context(needs)
    with torch.no_grad():
        detached = [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments]
        if function.setup_context is not autograd_function._SingleLevelFunction.setup_context:
            made = function.forward(*detached, **options)
            function.setup_context(context, tuple(detached), made)
        else:
            made = function.forward(context, *detached, **options)
    if context.dirty:
        raise _refused(function, "writes to its input in place (mark_dirty)", "Return a new tensor.")
    if not any(needs) or not torch.is_grad_enabled():
        return made
    is_sequence = isinstance(made, (tuple, list))
    values = tuple(made) if is_sequence else (made,)
    corrected = _with_gradient(function, context, arguments, values)
    return corrected if is_sequence else corrected[0]


def _needs_gradient(argument: Any) -> bool:
    return isinstance(argument, torch.Tensor) and argument.requires_grad


def _with_gradient(
    function: Any, context: _Context, arguments: tuple[Any, ...], values: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Return what forward made, each with the term whose gradient is the function's own."""
    incoming = [
        torch.full_like(v, INCOMING).requires_grad_() if _is_differentiable(v, context) else _no_gradient(v, context)
        for v in values
    ]
    with_gradient = [g for g in incoming if g is not None and g.requires_grad]
    if not with_gradient:
        return values
    gradients = _backward(function, context, incoming, len(arguments))
    pairs = [(b, a - a.detach()) for a, b in zip(arguments, gradients) if _needs_gradient(a) and b is not None]
    for gradient, _ in pairs:
        if not gradient.requires_grad:
            raise _refused(
                function, "has a backward whose result does not follow from the incoming gradient",
                "Return None for an input that gets no gradient, and compute with torch, not under no_grad().",
            )  # fmt: skip
    if not pairs:
        return tuple(v.detach() if isinstance(v, torch.Tensor) else v for v in values)
    terms = torch.autograd.grad(
        [gradient for gradient, _ in pairs], with_gradient, [carrier for _, carrier in pairs], create_graph=True,
        allow_unused=True,
    )  # fmt: skip
    by_gradient = dict(zip(map(id, with_gradient), terms))
    added = [by_gradient.get(id(g)) if g is not None else None for g in incoming]
    return tuple(v if term is None else v + term for v, term in zip(values, added))


def _is_differentiable(value: Any, context: _Context) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and id(value) not in context.constant


def _no_gradient(value: Any, context: _Context) -> torch.Tensor | None:
    """Return what a backward gets for an output that has no gradient."""
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) and context.materialize_grads else None


def _backward(function: Any, context: _Context, incoming: list[torch.Tensor | None], inputs: int) -> tuple[Any, ...]:
    """Return the gradients of the inputs, recorded by autograd (which `once_differentiable` would prevent)."""
    try:
        with torch.enable_grad():
            returned = _backward_of(function)(context, *incoming)
    except CaptureFailed:
        raise
    except Exception as error:  # the function is the user's: anything may go wrong in it
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise _refused(function, f"has a backward that cannot be traced ({reason})", "Write it in torch.") from error
    gradients = tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
    return (*gradients, *(None for _ in range(inputs - len(gradients))))


def _backward_of(function: Any) -> Any:
    """Return a function's derivative, which torch takes by either name. The wrapper of `once_differentiable` is
    removed."""
    is_vjp = function.vjp is not autograd_function._SingleLevelFunction.vjp
    return inspect.unwrap(function.vjp if is_vjp else function.backward)


def _refused(function: Any, reason: str, hint: str) -> CaptureFailed:
    return CaptureFailed(f"The autograd function {function.__name__} {reason}.{at(_place(function))}", hint=hint)


def _place(function: Any) -> str:
    """Return the file and line of a function's backward."""
    try:
        method = _backward_of(function)
        return f"{inspect.getsourcefile(method)}:{inspect.getsourcelines(method)[1]}"
    except (OSError, TypeError):  # written in a terminal
        return ""
