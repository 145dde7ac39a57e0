"""Given experts and padding for models of transformers: fields of the batch that reach the experts of every layer.

A model hands keyword arguments that it does not know to its decoder layers, and these to their attention, also where
gradient checkpointing computes a layer again. So a hook on the model puts both fields into one argument, and hooks on
the parts of layers take it out.

Legend: B sequences, L tokens of a sequence, T tokens on this rank, E experts, K experts per token.
"""

import functools
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn

from sonic_ep.integrations.transformers.experts import GIVEN, ROUTER_OUTPUTS, registered_experts
from sonic_ep.integrations.transformers.router_outputs import RouterOutputs, router_next_to
from sonic_ep.routers.given_routing import GivenRouting, RoutingRecord

_ARGUMENT, _FIELDS = "sonic_ep_batch", "_sonic_ep_batch_fields"


def replay_routing(model: nn.Module) -> list[str]:
    """Lets a model take `routed_experts`, the experts of each token. Returns the names of the experts' modules.

    Call it once the model is built, on every rank, after PEFT has adapted it. From then on
    `model(**batch, routed_experts=ids)` computes with these experts, ids (B, L, layers, K) integers with -1 in place of
    each for padding. Weights come from the live logits. Nothing is rounded. Without the field the router chooses.

    Example: replay_routing(model)
             with sonic_ep.record_routing() as record:
                 model(input_ids)
             model(input_ids, routed_experts=recorded_experts(model, record, len(input_ids)))

    Raises:  ValueError, with the fix, if there are no experts that sonic_ep could compute, no router next to them, or
             transformers dispatches itself (ep_implementation="all_reduce" and the like).
             A forward raises ValueError, on every rank of expert parallelism, for wrong ids, a router whose weights are
             no scaled scores and `tp_size` above 1; RuntimeError if the field does not reach a layer.
    """
    found = registered_experts(model, "there is no routing to replay", "replay_routing")
    routers = {name: router_next_to(model, name) for name in found}
    for name, experts in found.items():
        before: RouterOutputs | None = getattr(experts, ROUTER_OUTPUTS, None)
        if before is not None:
            before.remove()
        setattr(experts, ROUTER_OUTPUTS, RouterOutputs(routers[name], "replay_routing", training_only=False))
    _fields_of(model, found).takes_experts = True
    return list(found)


def skip_padding(model: nn.Module) -> list[str]:
    """Leaves tokens out of all experts that `attention_mask`, (B, L), marks with 0. Returns their names.

    Call it once the model is built, on every rank, after PEFT has adapted it. The experts' output is 0 for padding,
    which is not dispatched and takes no part in rounding.

    Raises:  ValueError, with the fix, if there are no experts that sonic_ep could compute, or transformers dispatches
             itself. A forward raises ValueError, on every rank of expert parallelism, for a mask of another shape;
             RuntimeError if the mask does not reach a layer.
    """
    found = registered_experts(model, "there are no experts that could skip padding", "skip_padding")
    _fields_of(model, found).skips_padding = True
    return list(found)


def recorded_experts(model: nn.Module, record: RoutingRecord, num_sequences: int) -> Tensor:
    """Returns (B, L, layers, K) int64: what the routers of a model chose in one forward, or in one `generate`.

    num_sequences: B. After generation L counts the prompt and all new tokens but the last, which no layer has computed.
    layers are those with experts. Raises RuntimeError if nothing was recorded.
    """
    found = registered_experts(model, "there is no recorded routing")
    of_layers = [[each.unflatten(0, (num_sequences, -1)) for each in record.of(experts)] for experts in found.values()]
    return torch.stack([torch.cat(calls, 1) for calls in of_layers], 2)


@final
class _Batch:
    """The fields of one forward. make: of E and K what they give for all layers. reached: the layers that read it."""

    def __init__(self, make: Callable[..., GivenRouting]) -> None:
        self._make, self._given = make, None
        self.reached: set[int] = set()

    def given(self, layer: int, E: int, K: int) -> GivenRouting:
        """Returns what is given for a layer. The host waits in the first one."""
        self.reached.add(layer)
        self._given = self._given or self._make(E=E, K=K)
        return self._given.of_layer(layer)


@final
class _BatchFields:
    """The hooks of one model."""

    def __init__(self, model: nn.Module, found: dict[str, nn.Module]) -> None:
        self.takes_experts = self.skips_padding = False
        self._num_layers = len(found)
        self._experts: dict[nn.Module, list[tuple[int, nn.Module]]] = {}  # by decoder layer
        for index, (name, experts) in enumerate(found.items()):
            layer, siblings = _layer_around(model, name)
            for each in siblings:
                self._experts.setdefault(each, [])
            self._experts[layer].append((index, experts))
        model.register_forward_pre_hook(self._before_model, with_kwargs=True)
        model.register_forward_hook(self._after_model, with_kwargs=True)
        for layer in self._experts:
            layer.register_forward_pre_hook(self._before_layer, with_kwargs=True)
            for part in layer.children():  # transformers 5.24 computes a layer again without the layer's hooks
                part.register_forward_pre_hook(functools.partial(self._before_part, layer), with_kwargs=True)

    def _before_model(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        routed_experts, padding_mask, problem = kwargs.pop("routed_experts", None), None, None
        tokens = _tokens_of(args, kwargs)
        if self.skips_padding:
            padding_mask, problem = _padding_of(kwargs.get("attention_mask"), tokens)
        if routed_experts is not None and not self.takes_experts:
            problem = "the batch has routed_experts, which this model does not take; call replay_routing(model)"
        if problem is not None:
            # The first layer with experts raises it, on all ranks. Attention before it might raise on this one.
            batch = _Batch(lambda **_: GivenRouting(tokens.shape[:-1], problem=problem))
            return args, {**kwargs, "attention_mask": None, _ARGUMENT: batch}
        if routed_experts is None and padding_mask is None:
            return args, kwargs
        layers = (self._num_layers,)
        batch = _Batch(functools.partial(GivenRouting.of, tokens, routed_experts, padding_mask, layers=layers))
        return args, {**kwargs, _ARGUMENT: batch}

    def _after_model(self, model: nn.Module, _: Any, kwargs: dict[str, Any], __: object) -> None:
        batch: _Batch | None = kwargs.get(_ARGUMENT)
        if batch is not None and len(batch.reached) < self._num_layers:
            raise RuntimeError(
                f"routed_experts or padding reached {len(batch.reached)} of {self._num_layers} layers with experts: "
                f"{type(model).__name__} does not hand on keyword arguments, or other experts computed; use "
                "experts_implementation='sonic_ep', or train this model without replay_routing and skip_padding"
            )

    def _before_layer(self, layer: nn.Module, _: object, kwargs: dict[str, Any]) -> None:
        batch: _Batch | None = kwargs.get(_ARGUMENT)
        is_recomputed = layer.training and getattr(layer, "gradient_checkpointing", False)
        for index, experts in self._experts[layer]:
            given: Any = None if batch is None else functools.partial(batch.given, index)
            setattr(experts, GIVEN, _refuse_to_recompute if is_recomputed and batch is not None else given)

    def _before_part(self, layer: nn.Module, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        batch: _Batch | None = kwargs.pop(_ARGUMENT, None)
        if batch is not None:
            for index, experts in self._experts[layer]:
                setattr(experts, GIVEN, functools.partial(batch.given, index))
        return args, kwargs


def _refuse_to_recompute(*_: object) -> GivenRouting:
    """In place of what is given, unless a part of the layer gets it, as it does again in a recomputation."""
    raise RuntimeError(
        "this layer hands routed_experts and padding to none of its parts, so a recomputation would not have them; "
        "train this model without gradient checkpointing, or without replay_routing and skip_padding"
    )


def _fields_of(model: nn.Module, found: dict[str, nn.Module]) -> _BatchFields:
    fields: _BatchFields | None = getattr(model, _FIELDS, None)
    if fields is None:
        fields = _BatchFields(model, found)
        setattr(model, _FIELDS, fields)
    return fields


def _layer_around(model: nn.Module, experts: str) -> tuple[nn.Module, list[nn.Module]]:
    """Returns the decoder layer that holds the experts of this name, and all layers of its list."""
    parts = experts.split(".")
    for length in reversed(range(1, len(parts))):
        siblings = model.get_submodule(".".join(parts[:length]))
        if isinstance(siblings, nn.ModuleList):
            return siblings[int(parts[length])], [*siblings]
    raise ValueError(
        f"{experts} is in no layer of an nn.ModuleList, to which a model would hand the fields of a batch; train this "
        "model without replay_routing and skip_padding"
    )


def _tokens_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Returns a tensor (B, L, anything) of the batch."""
    embeds, ids = kwargs.get("inputs_embeds"), kwargs.get("input_ids", args[0] if args else None)
    if isinstance(embeds, Tensor):
        return embeds
    if isinstance(ids, Tensor):
        return ids[..., None]
    raise ValueError("replay_routing and skip_padding need input_ids or inputs_embeds of (B, L); give one of them")


def _padding_of(attention_mask: Any, tokens: Tensor) -> tuple[Tensor | None, str | None]:
    """Returns the padding, (B, L) bool, or None; and what is wrong with the mask, or None."""
    if attention_mask is None:
        return None, None
    B, L = tokens.shape[:2]
    shape = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
    if not isinstance(shape, tuple) or len(shape) != 2 or shape[0] != B or shape[1] < L:
        return None, f"attention_mask is {shape}, and skip_padding needs (B={B}, L={L}) with 0 for padding; give that"
    return attention_mask[:, shape[1] - L :] == 0, None  # in generation the mask has earlier tokens, too
