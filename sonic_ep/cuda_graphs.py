"""CUDA graphs of the MoE layers in a model that otherwise runs eagerly. A replay needs almost no host time."""

import gc
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import cast, final

import torch
from torch import Tensor

from sonic_ep.autocast import autocast_dtype
from sonic_ep.checks import problem_with_input
from sonic_ep.groups.order import Forward, Ran
from sonic_ep.layer import MoE, MoEOutput
from sonic_ep.routers.replay import in_region

_DEVICES = {"cuda"}  # device types with graphs


def graph_layers(layers: Sequence[MoE], x: Tensor) -> None:
    """Captures CUDA graphs of each layer's forward and backward. From then on the layers replay them in training mode.

    Evaluation is not graphed. A collective: every rank of the layers' groups calls it, and must run these layers as
    often as the other ranks afterwards. It runs each layer three times before the capture; weights and counts stay as
    they are. Under autocast, use torch.autocast(..., cache_enabled=False).

    layers: in the order in which the model runs them, because the graphs share memory that only one of them may use at
        a time. With several ranks they need transport.buffers = "static".
    x: (T, d) or (B, L, d) on a GPU, of the shape, dtype and device that all layers will get.

    A graph has one set of buffers for what it saves and returns. So a layer runs forward and backward in turns, and
    backwards run in the reverse of the order of `layers`; anything else raises an error, see docs/cuda_graphs.md.

    * Layers that run in other orders need calls of `graph_layers` of their own, and then share no memory.
    * The next forward of a layer overwrites its outputs. Clone losses and stats that you need longer.
    * It has a gradient buffer for each parameter. After a backward, `grad` may be that buffer; the next forward of any
      of these layers replaces it by a clone.
    * No output of an earlier forward of the layers may still be referenced, or torch fails to capture.

    Raises ValueError, on every rank, if there are no layers, or a layer is in eval mode, has been graphed, reads sizes
    or logits on the host, or has parameters of FSDP, or if the layers cannot take x. torch raises AssertionError for
    modules with hooks.
    """
    if not layers:
        raise ValueError("layers is empty; pass the MoE layers of the model, in their order")
    for layer in layers:
        layer.group.raise_together(_problem(layer, x), stage="graph_layers", shape=tuple(x.shape))
    samples = tuple((x.detach().clone().requires_grad_(),) for _ in layers)
    with ExitStack() as uncounted:
        for layer in layers:
            uncounted.enter_context(layer.router.uncounted())
        gc.collect()  # an older graph that is garbage must not be destroyed during the capture
        torch.cuda.make_graphed_callables(tuple(layers), samples)
    gradients, saved = _Gradients(), _Saved(len(layers))
    for position, layer in enumerate(layers):
        _Replays(layer, x, gradients, saved, position)


def _problem(layer: MoE, x: Tensor) -> str | None:
    config, w1 = layer.config, layer.experts.w1
    if "forward" in vars(layer):
        return "the layer has been graphed before; a graph is made once"
    if not layer.training:
        return "the layer is in eval mode; graphs are of training: call layer.train() first"
    if layer.group.size > 1 and config.transport.buffers != "static":
        return (
            f"transport.buffers={config.transport.buffers!r} reads row counts on the host, which a graph cannot; set "
            '"static", and rounding.capacity_factor'
        )
    if config.router.check_logits:
        return "router.check_logits=True reads logits on the host, which a graph cannot; set it to False"
    if any(hasattr(parameter, "placements") for parameter in layer.parameters()):
        return "FSDP gathers parameters of the layer anew in every step; leave the whole layer out of fully_shard"
    if w1.device.type not in _DEVICES:
        return f"the layer is on {w1.device}, which has no CUDA graphs; move it to a GPU"
    cast = isinstance(x, Tensor) and torch.is_autocast_enabled(x.device.type)
    return problem_with_input(
        x,
        d=config.d,
        dtype=x.dtype if cast else w1.dtype,
        device=w1.device,
        sequences=config.router.balance == "sequence",
    )


@final
class _Gradients:
    """Protects the gradients that lie in a graph's buffers, where the next replay of these layers may write.

    The graphs of all forwards and backwards share memory, and if `grad` is None, autograd stores a graph's own buffer
    there (pytorch issue 181723).
    """

    def __init__(self) -> None:
        self._left: list[tuple[weakref.ref[Tensor], int]] = []

    def watch(self, parameter: Tensor) -> None:
        param = weakref.ref(parameter)
        parameter.register_hook(lambda gradient: self._left.append((param, gradient.data_ptr())))

    def save(self) -> None:
        """Clones these gradients. Call it before a replay."""
        for param, address in self._left:
            parameter = param()
            if parameter is not None and parameter.grad is not None and parameter.grad.data_ptr() == address:
                parameter.grad = parameter.grad.clone()
        self._left.clear()


@final
class _Saved:
    """Knows whether replays have overwritten what a layer's forward saved for its backward.

    All forwards are captured in the order of the layers, then all backwards in reverse. What a capture frees, those
    after it use. So a replay of a layer, forward or backward, may overwrite what later layers have saved, but not what
    earlier ones have.
    """

    def __init__(self, num_layers: int) -> None:
        self._intact: list[int] = []  # positions of layers of which nothing is overwritten, in ascending order
        self._overwritten_by: list[int | None] = [None] * num_layers  # the position of the first that did it

    def forward(self, position: int) -> None:
        """Call it before the forward of the layer at `position` is replayed."""
        self._overwrite(position)
        self._overwritten_by[position] = None
        if self._intact[-1:] != [position]:
            self._intact.append(position)

    def backward(self, position: int) -> None:
        """Call it after the backward of the layer at `position` has been replayed."""
        self._overwrite(position)

    def _overwrite(self, position: int) -> None:
        while self._intact and self._intact[-1] > position:
            self._overwritten_by[self._intact.pop()] = position

    def check(self, position: int) -> None:
        """Raises RuntimeError if the backward of the layer at `position` would read what was overwritten."""
        by = self._overwritten_by[position]
        if by is not None:
            raise RuntimeError(
                f"layer {position} of graph_layers' list would run backward after layer {by} has been replayed, which "
                f"overwrote what layer {position} saved; run backwards in the reverse order of the list, or graph each "
                "layer by a call of its own"
            )


@final
class _Replays:
    """Hooks that check the replays of one layer.

    The layer's hooks refer to this object. It refers to no parameter, because that would be a reference cycle.
    """

    def __init__(self, layer: MoE, x: Tensor, gradients: _Gradients, saved: _Saved, position: int) -> None:
        self._layer = weakref.ref(layer)
        self._wanted, self._weights = _signature(x), _addresses(layer)
        self._gradients, self._saved, self._position = gradients, saved, position
        self._num_forwards = 0
        self._last_backward = 0  # the number of the forward of which the last backward was
        layer.register_forward_pre_hook(self._before, with_kwargs=True)
        layer.register_forward_hook(self._after)
        for parameter in layer.parameters():
            if parameter.requires_grad:
                gradients.watch(parameter)

    def _before(
        self, layer: MoE, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[Tensor], dict[str, object]] | None:
        if layer is not self._layer():
            raise RuntimeError("a copy of a graphed layer would compute with the original's weights; copy it before")
        if not layer.training:
            return None
        layer.transport.raise_if_lost()
        if in_region():
            raise RuntimeError("a graphed layer decides anew in every forward; keep it out of activation checkpointing")
        if kwargs:
            raise ValueError(f"a graphed layer takes x alone, and got {', '.join(kwargs)}; leave this layer eager")
        given = _signature(args[0]) if len(args) == 1 and isinstance(args[0], Tensor) else args
        if given != self._wanted:
            raise ValueError(f"x is {given}, the layer was graphed for {self._wanted}; pass x alone, and pad the batch")
        if _addresses(layer) != self._weights:
            raise RuntimeError(
                "parameters have been replaced or moved since the layer was graphed, which replays do not see; change "
                "them in place"
            )
        self._gradients.save()
        self._saved.forward(self._position)
        self._num_forwards += 1
        if layer.group.size > 1:
            forward = Forward(layer._number, self._num_forwards)
            layer.group.order.add_ran(Ran(forward, is_graphed=True, is_replay=True))
        x = cast(Tensor, args[0])
        if not (x.is_leaf and x.requires_grad and torch.is_grad_enabled()):
            return None
        x = x.view_as(x)
        x.register_hook(Tensor.clone)  # otherwise the leaf's `grad` would be the graph's buffer
        return (x,), {}

    def _after(self, layer: MoE, args: object, output: MoEOutput) -> MoEOutput:
        if not layer.training:
            return output
        forward, node = self._num_forwards, output.y.grad_fn
        if node is not None:
            for value in (output.y, output.aux_loss):
                value.register_hook(partial(self._before_backward, forward))
            node.register_hook(partial(self._after_backward, forward))
        # Autograd treats every output of a replay as differentiable; the entropy is not.
        return output._replace(stats=output.stats._replace(entropy_T=output.stats.entropy_T.detach()))

    def _before_backward(self, forward: int, _: Tensor) -> None:
        if forward != self._num_forwards:
            raise RuntimeError(
                "a graphed layer was run again before the backward of its earlier output, and keeps only the last; run "
                "one microbatch at a time, forward and backward"
            )
        if forward == self._last_backward:
            raise RuntimeError(
                "a graphed layer would run a second backward of one output, and what the first read is overwritten; "
                "run one backward, of the sum of the losses"
            )
        self._saved.check(self._position)

    def _after_backward(self, forward: int, *_: object) -> None:
        self._last_backward = forward
        self._saved.backward(self._position)
        layer = self._layer()
        if layer is not None and layer.group.size > 1:
            layer.group.order.add_ran(Ran(Forward(layer._number, forward), is_graphed=True))


def _signature(x: Tensor) -> tuple[object, ...]:
    """Returns shape, dtype, device and autocast dtype, which a graph is captured for."""
    return tuple(x.shape), x.dtype, x.device, f"autocast: {autocast_dtype(x.device.type)}"


def _addresses(layer: MoE) -> list[int]:
    return [parameter.data_ptr() for parameter in layer.parameters()]
