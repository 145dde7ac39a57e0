"""`GraphOperation`: a call in eager mode as one operation of a compiled graph, and its backward as another.

torch.compile sees the tensors that go in and come out. What autograd needs in between is the call's own graph. The
compiled graph passes a *ticket* from forward to backward, a tensor of one number: the call's graph lives as long as the
memory of its ticket.
"""

from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple, Self, cast, final
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch._ops import OpOverloadPacket
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from sonic_ep.first_order import Context, refuse_second_order

_KEYS = torch._C.DispatchKey
_AUTOGRAD = torch._C.DispatchKeySet(_KEYS.AutogradFunctionality)
for _key in (_KEYS.AutogradOther, _KEYS.AutogradNestedTensor, _KEYS.ADInplaceOrView):
    _AUTOGRAD |= torch._C.DispatchKeySet(_key)
# Not torch.library.custom_op, whose checks take 0.03 ms a call.
_LIBRARY = torch.library.Library("sonic_ep", "FRAGMENT")
_TAGS = torch.Tag.cudagraph_unsafe, torch.Tag.pt2_compliant_tag
_Inputs = tuple[list[Tensor], list[bool], Tensor, *tuple[object, ...]]
_ForBackward = tuple[list[bool], list[list[None] | None]]


class Outputs(NamedTuple):
    """Of an operation. differentiable: those that may have gradients; autograd has saved none. others: the others.

    later: more of them, that few graphs use: see `output_of`.
    """

    differentiable: Sequence[Tensor]
    others: Sequence[Tensor] = ()
    later: Sequence[Tensor] = ()


@final
class _Graph(bytearray):
    """From the inputs of a call that need a gradient to its outputs."""

    edges: list[GradientEdge | None]
    inputs: list[Tensor]
    later: Sequence[Tensor]

    @classmethod
    def of(cls, outputs: Sequence[Tensor], later: Sequence[Tensor], inputs: list[Tensor]) -> Self:
        graph = cls(torch.int64.itemsize)
        graph.later = later
        # Edges hold no output. Of views, because torch 2.11 refuses one of an autograd function in Python.
        graph.edges = [get_gradient_edge(each.view_as(each)) if each.requires_grad else None for each in outputs]
        graph.inputs = inputs
        return graph

    def ticket(self) -> Tensor:
        number = next(_NUMBERS)  # not an address: a copied ticket must find no later graph
        _GRAPHS[number] = self
        return torch.frombuffer(self, dtype=torch.int64).fill_(number)  # in the memory of this object


_GRAPHS = WeakValueDictionary[int, _Graph]()
_NUMBERS = count()


@final
class GraphOperation:
    """sonic_ep::NAME(Tensor[] tensors, bool[] needs, Tensor call, CONSTANTS) -> (Tensor[], Tensor[], Tensor).

    needs: of which tensors the gradient is needed. call: see `in_graph`. constants: the further arguments, in torch's
    language of schemas. run: computes the outputs from the tensors and the further arguments, in eager mode. It returns
    no input, and saves no further argument that is not `lasting`. fake: returns tensors of the same shapes, from the
    same. first_lasting: the first of the tensors that are parameters or views of them; default: those that come as
    parameters are. No graph overwrites them.

    Equal layers share a compilation, so constants are of no single one.
    """

    def __init__(
        self,
        name: str,
        constants: str,
        run: Callable[..., Outputs],
        fake: Callable[..., Outputs],
        *,
        first_lasting: int | None = None,
    ) -> None:
        self._run, self._fake, self._first_lasting = run, fake, first_lasting
        schema = f"(Tensor[] tensors, bool[] needs, Tensor call, {constants}) -> (Tensor[], Tensor[], Tensor)"
        _define(name, schema, self._forward, self._fake_forward)
        torch.library.register_autograd(
            f"sonic_ep::{name}", self._differentiate, setup_context=self._setup_context, lib=_LIBRARY
        )

    def _forward(
        self, tensors: Sequence[Tensor], needs: Sequence[bool], call: Tensor, *constants: object
    ) -> tuple[list[Tensor], list[Tensor], Tensor]:
        with _autograd(), torch.set_grad_enabled(any(needs)):
            # In here, so that autograd notices if somebody writes to their memory before backward.
            inputs = self._inputs(tensors, needs) if any(needs) else [*tensors]
            outputs, others, later = self._run(inputs, *constants)
            needed = [each for each, n in zip(inputs, needs, strict=True) if n]
            ticket = _Graph.of(outputs, later, needed).ticket()
        return [each.detach() for each in outputs], [each.detach().clone() for each in others], ticket

    def _inputs(self, tensors: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
        first = len(tensors) if self._first_lasting is None else self._first_lasting
        pairs = enumerate(zip(tensors, needs, strict=True))
        return [_input(each, needed, lasts=number >= first) for number, (each, needed) in pairs]

    def _fake_forward(
        self, tensors: Sequence[Tensor], needs: Sequence[bool], call: Tensor, *constants: object
    ) -> tuple[list[Tensor], list[Tensor], Tensor]:
        outputs, others, _ = self._fake(tensors, *constants)
        return [*outputs], [*others], torch.empty(1, dtype=torch.int64, device="cpu")

    @staticmethod
    def _setup_context(
        ctx: Context[_ForBackward], inputs: _Inputs, output: tuple[list[Tensor], list[Tensor], Tensor]
    ) -> None:
        (x, *weights), needs, _, *constants = inputs
        _, others, ticket = output
        like = x.new_empty(()).expand(x.shape), *weights  # the call holds x, or a copy
        ctx.save_for_backward(ticket, *[each for each, needed in zip(like, needs, strict=True) if needed])
        ctx.mark_non_differentiable(*others, ticket)
        ctx.set_materialize_grads(False)
        # A list of tensors gets a list of gradients.
        lists = [
            [None] * len(each) if isinstance(each, list) and all(isinstance(v, Tensor) for v in each) else None
            for each in constants
        ]
        ctx.call = needs, lists

    @staticmethod
    def _differentiate(ctx: Context[_ForBackward], grads: list[Tensor | None], *_: object) -> tuple[object, ...]:
        ticket, *like = ctx.saved_tensors
        present = [number for number, grad in enumerate(grads) if grad is not None]
        found = iter(torch.ops.sonic_ep.backward([cast(Tensor, grads[n]) for n in present], present, ticket, like))
        needs, constants = ctx.call
        return [next(found) if needed else None for needed in needs], None, None, *constants


def like_first(tensors: list[Tensor], *_: object) -> Outputs:
    """The `fake` of an operation with one output, which is like its first tensor."""
    return Outputs([tensors[0].new_empty(tensors[0].shape)])


def in_graph(
    operation: OpOverloadPacket, tensors: list[Tensor], *constants: object
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Returns what an operation does, called in a compiled graph. constants: those of the call.

    Raises RuntimeError where torch.export traces, and in forward-mode differentiation.
    """
    if torch.compiler._is_exporting_flag:  # is_exporting() is always true in a trace of torch 2.11
        raise RuntimeError(
            "torch.export cannot export an MoE layer, a router or functional.moe, because a program in a file has no "
            "layer and no ranks to call; use torch.compile"
        )
    if forward_ad._current_level >= 0:  # torch would take the tangents for zero
        raise RuntimeError("an MoE layer has no forward-mode derivatives (torch.func.jvp); use torch.autograd.grad")
    needs = [each.requires_grad and torch.is_grad_enabled() for each in tensors]
    # torch merges calls with equal arguments into one, except of `empty`; a graph runs backward once only.
    return operation(tensors, needs, torch.empty(0, device="cpu"), *constants)


def output_of(ticket: Tensor, number: int, like: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Returns one of `Outputs.later`, on the device of `like`, filled up with -1 to this shape."""
    return torch.ops.sonic_ep.output(ticket, number, like.detach(), dtype, shape)


def _define(name: str, schema: str, function: Callable[..., object], fake: Callable[..., object]) -> None:
    _LIBRARY.define(name + schema, tags=_TAGS)
    # Where a graph breaks in front of an operation, Dynamo meets it. A lambda, because a method takes no attributes.
    run = _disable_dynamo(lambda *arguments: function(*arguments))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sonic_ep::{name}", fake, lib=_LIBRARY)


def _backward(grads: Sequence[Tensor], outputs: Sequence[int], ticket: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Returns the gradients of the inputs that need one. grads: of these outputs. like: such inputs."""
    graph = _GRAPHS.get(int(ticket))
    if graph is None:
        raise RuntimeError(
            "the graph of a compiled MoE layer is gone, because saved-tensor hooks copied its ticket, a CPU tensor of "
            "one int64; let hooks return tensors of one element as they are"
        )
    inputs = graph.inputs
    known = [(edge, grad) for number, grad in zip(outputs, grads, strict=True) if (edge := graph.edges[number])]
    found: Sequence[Tensor | None] = [None] * len(inputs)
    if known:
        edges, given = zip(*known, strict=True)
        retain = torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore[reportAttributeAccessIssue]
        with _autograd():
            # As torch.autograd.grad does, whose checks take 0.05 ms a call. The last two: unused inputs, no .grad.
            found = _engine_run_backward(edges, given, retain, False, tuple(inputs), True, accumulate_grad=False)
    # The graph may write to their memory: none may be a part of another.
    return [
        torch.zeros_like(each, memory_format=torch.contiguous_format) if grad is None else _own(grad)
        for grad, each in zip(found, inputs, strict=True)
    ]


def _like_backward(
    grads: Sequence[Tensor], outputs: Sequence[int], ticket: Tensor, like: Sequence[Tensor]
) -> list[Tensor]:
    return [each.new_empty(each.shape) for each in like]


def _output(ticket: Tensor, number: int, like: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    values = _GRAPHS[int(ticket)].later[number].detach()
    if values.shape == torch.Size(shape):
        return values.clone()
    filled = values.new_full(shape, -1)
    filled[: len(values)] = values
    return filled


def _like_output(ticket: Tensor, number: int, like: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    return like.new_empty(shape, dtype=dtype)


_define(
    "backward", "(Tensor[] grads, int[] outputs, Tensor ticket, Tensor[] like) -> Tensor[]", _backward, _like_backward
)
torch.library.register_autograd("sonic_ep::backward", refuse_second_order, lib=_LIBRARY)
_define(
    "output",
    "(Tensor ticket, int number, Tensor like, ScalarType dtype, SymInt[] shape) -> Tensor",
    _output,
    _like_output,
)


def _input(values: Tensor, needed: bool, *, lasts: bool) -> Tensor:
    """Returns the tensor of which autograd gives the gradient: a parameter itself, unless its own hooks would run."""
    if isinstance(values, nn.Parameter) and values.requires_grad == needed and not values._backward_hooks:
        return values
    return (values if lasts else lasting(values)).detach().requires_grad_(needed)


def lasting(values: Tensor) -> Tensor:
    """Returns values that stay as they are until backward. A compiled graph may overwrite those that it has made."""
    lasts = values.requires_grad or isinstance(values, nn.Parameter) or not torch.is_grad_enabled()
    return values if lasts else values.clone()


def _own(grad: Tensor) -> Tensor:
    is_part = grad.numel() * grad.itemsize < grad.untyped_storage().nbytes()
    return grad.clone(memory_format=torch.contiguous_format) if is_part else grad.contiguous()


def _autograd() -> torch._C._ForceDispatchKeyGuard:
    """Returns a context in which autograd works, in an operation, which runs below it."""
    excluded = torch._C._dispatch_tls_local_exclude_set() - _AUTOGRAD
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)
