"""CUDA graphs of layers in a model that otherwise runs eagerly: replaying one costs the host next to nothing."""

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from sonic_ep.checks import problem_with_input
from sonic_ep.layer import MoE, MoEOutput
from sonic_ep.routers.replay import in_region

_DEVICES = {"cuda"}  # that have graphs


def graph_layers(layers: Sequence[MoE], x: Tensor) -> None:
    """From here on each layer replays CUDA graphs of its forward and backward while it trains; it evaluates as ever.

    A collective: every rank of the layers' groups calls it, and from then on runs these layers as often as the others.
    It runs each layer three times and changes nothing in it. Under autocast pass cache_enabled=False to that.

    layers: in the order in which the model runs them; the graphs share memory that only one of them uses at a time.
    Several ranks need transport.buffers = "static". x: as all of them will get it, (T, d) or (B, L, d) on a GPU.

    A graph knows one place for what it keeps and gives. Another forward of a layer before its backward, other shapes,
    parameters that have moved, a copy and recomputation under `replay_contexts` raise an error; what a layer gave is
    overwritten by its next forward, so clone losses and stats that are to be kept longer. Each layer's graph has a
    gradient of each of its parameters, which `grad` is until one of the layers runs forward again. Nothing that earlier
    forwards of the layers gave may still be held: torch would fail to capture.

    Raises ValueError, on every rank: no layers, one that evaluates, has been graphed, reads sizes or logits on the host
    or has FSDP's parameters; an x that the layers cannot take. torch raises AssertionError for modules with hooks.
    """
    if not layers:
        raise ValueError("layers is empty; pass the MoE layers of the model, in their order")
    for layer in layers:
        layer.group.raise_together(_problem(layer, x), shape=tuple(x.shape))
    samples = tuple((x.detach().clone().requires_grad_(),) for _ in layers)
    with ExitStack() as uncounted:
        for layer in layers:
            uncounted.enter_context(layer.router.uncounted())
        torch.cuda.make_graphed_callables(tuple(layers), samples)
    gradients = _Gradients()
    for layer in layers:
        _Replays(layer, x, gradients)


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
    """Those that replays have left where the next replay of these layers may write: forwards and backwards share
    memory, and autograd takes a graph's own buffer for a `grad` that is None (pytorch issue 181723)."""

    def __init__(self) -> None:
        self._left: list[tuple[weakref.ref[Tensor], int]] = []

    def watch(self, parameter: Tensor) -> None:
        param = weakref.ref(parameter)
        parameter.register_hook(lambda gradient: self._left.append((param, gradient.data_ptr())))

    def save(self) -> None:
        """Before a replay."""
        for param, address in self._left:
            parameter = param()
            if parameter is not None and parameter.grad is not None and parameter.grad.data_ptr() == address:
                parameter.grad = parameter.grad.clone()
        self._left.clear()


@final
class _Replays:
    """What watches over the replays of one layer. Its hooks hold it; it holds no parameter, which would hold it too."""

    def __init__(self, layer: MoE, x: Tensor, gradients: _Gradients) -> None:
        self._layer = weakref.ref(layer)
        self._wanted, self._weights = _signature(x), _addresses(layer)
        self._gradients = gradients
        self._forwards, self._went_back = 0, 0
        layer.register_forward_pre_hook(self._before)
        layer.register_forward_hook(self._after)
        for parameter in layer.parameters():
            if parameter.requires_grad:
                gradients.watch(parameter)

    def _before(self, layer: MoE, args: tuple[Any, ...]) -> tuple[Tensor] | None:
        if layer is not self._layer():
            raise RuntimeError("a copy of a graphed layer would compute with the original's weights; copy it before")
        if not layer.training:
            return None
        layer.transport.raise_if_lost()
        if in_region():
            raise RuntimeError("a graphed layer decides anew in every forward; keep it out of activation checkpointing")
        given = _signature(args[0]) if len(args) == 1 and isinstance(args[0], Tensor) else args
        if given != self._wanted:
            raise ValueError(f"x is {given}, the layer was graphed for {self._wanted}; pass x alone, and pad the batch")
        if _addresses(layer) != self._weights:
            raise RuntimeError(
                "parameters have been replaced or moved since the layer was graphed, which replays do not see; change "
                "them in place"
            )
        self._gradients.save()
        self._forwards += 1
        x: Tensor = args[0]
        if not (x.is_leaf and x.requires_grad and torch.is_grad_enabled()):
            return None
        x = x.view_as(x)
        x.register_hook(Tensor.clone)  # or the leaf's `grad` would be the graph's buffer
        return (x,)

    def _after(self, layer: MoE, args: object, output: MoEOutput) -> MoEOutput:
        if not layer.training:
            return output
        forward, node = self._forwards, output.y.grad_fn
        if node is not None:
            for value in (output.y, output.aux_loss):
                value.register_hook(partial(self._before_backward, forward))
            node.register_hook(partial(self._after_backward, forward))
        # To autograd whatever a replay gives might have a gradient.
        return output._replace(stats=output.stats._replace(entropy_T=output.stats.entropy_T.detach()))

    def _before_backward(self, forward: int, _: Tensor) -> None:
        if forward != self._forwards:
            raise RuntimeError(
                "a graphed layer was run again before the backward of its earlier output, and keeps only the last; run "
                "one microbatch at a time, forward and backward"
            )
        if forward == self._went_back:
            self._gradients.save()

    def _after_backward(self, forward: int, *_: object) -> None:
        self._went_back = forward


def _signature(x: Tensor) -> tuple[object, ...]:
    """What a graph is made for."""
    autocast = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None
    return tuple(x.shape), x.dtype, x.device, f"autocast: {autocast}"


def _addresses(layer: MoE) -> list[int]:
    return [parameter.data_ptr() for parameter in layer.parameters()]
