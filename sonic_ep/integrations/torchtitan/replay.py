"""Given experts for torchtitan: a field of the batch that reaches the router of every MoE.

torchtitan's Trainer hands every field of a batch to the model. A hook on the model takes the field out, and hooks on
the blocks add each block's part to its arguments. Activation checkpointing keeps these, so a recomputation in any order
of micro-batches has them, too. A hook on the router puts them in place of its own choice, so torchtitan's counts of
tokens see them as well.

Legend: B sequences, L tokens of a sequence, T tokens on this rank, E experts, K experts per token.
"""

from functools import partial
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from sonic_ep.integrations.torchtitan.routed_experts import SonicEPRoutedExperts
from sonic_ep.routers.given_routing import NOTHING_GIVEN, UNSET, GivenRouting, RoutingRecord, add_to_records, recording

_FIELD, _ARGUMENT = "routed_experts", "sonic_ep_given"
_Args = tuple[object, ...]
_Kwargs = dict[str, object]


def replay_routing(model: nn.Module) -> list[str]:
    """Lets a part of a model take `routed_experts`, the experts of each token. Returns the names of its MoEs.

    Call it once on every rank, on each of a Trainer's `model_parts`. From then on a field `routed_experts` of a batch,
    (B, L, layers, K) integers, takes the place of the routers' top-K. Weights come from the live scores, as torchtitan
    makes them, and its counts of tokens are of the given experts. For a token with -1 in place of each the router
    chooses, as it does without the field.

    Raises:  ValueError, with the fix, if experts are not ours, or rounded, or in no block of `model.layers`. A forward
             raises ValueError, on every rank of expert parallelism, for wrong ids, and under torch.compile;
             RuntimeError if the field does not reach every MoE.
    """
    every = _experts_of(model)
    if not every:
        raise ValueError(
            "the model has no experts that sonic_ep computes, so there is no routing to replay; add "
            "sonic_ep.integrations.torchtitan.moe.routed_experts to override.imports"
        )
    blocks = {
        f"layers.{name}.moe": block
        for name, block in model.get_submodule("layers").named_children()
        if isinstance(getattr(getattr(block, "moe", None), "routed_experts", None), SonicEPRoutedExperts)
    }
    if len(every) > len(blocks) or len({(experts.num_experts, experts.top_k) for experts in every}) > 1:
        raise ValueError(
            f"{len(every)} MoEs, of which {len(blocks)} are in blocks of model.layers, cannot take their experts from "
            "one tensor of all layers; replay needs one num_experts and top_k, and no MoE elsewhere (MTP)"
        )
    if any(experts.options.rounding is not None for experts in every):
        raise ValueError("given experts are not rounded; replace rounded_moe by routed_experts in override.imports")
    _Replay(model, [*blocks.values()])
    return [*blocks]


def recorded_experts(model: nn.Module, record: RoutingRecord) -> Tensor:
    """Returns (B, L, layers, K) int64: what the routers chose in one forward inside of `sonic_ep.record_routing()`.

    The model has gone through `replay_routing`. With tensor parallelism all of its ranks record. Raises RuntimeError if
    nothing was recorded.
    """
    return torch.stack([torch.cat(record.of(experts)) for experts in _experts_of(model)], 2)


def _experts_of(model: nn.Module) -> list[SonicEPRoutedExperts]:
    return [module for module in model.modules() if isinstance(module, SonicEPRoutedExperts)]


@final
class _Replay:
    """The hooks of one part of a model. given: of the forward that runs, for all layers."""

    def __init__(self, model: nn.Module, blocks: list[Any]) -> None:
        self._given: GivenRouting | None = None
        self._reached: set[int] = set()
        self._blocks = blocks
        model.register_forward_pre_hook(self._before_model, with_kwargs=True)
        model.register_forward_hook(self._after_model)
        for layer, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._before_block, layer), with_kwargs=True)
            inner = getattr(block, "_checkpoint_wrapped_module", block)
            inner.register_forward_pre_hook(partial(_take_given, inner.moe.routed_experts), with_kwargs=True)
            inner.moe.router.register_forward_hook(partial(self._after_router, layer, inner.moe))

    def _before_model(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        experts, ids = self._blocks[0].moe.routed_experts, kwargs.pop(_FIELD, None)
        self._given, self._reached = None, set()
        if ids is not None:
            if any(getattr(block, "_compiled_call_impl", None) is not None for block in self._blocks):
                raise ValueError("a compiled model takes no routed_experts; set compile.enable=False")
            tokens = args[0] if args else kwargs["tokens"]
            x = tokens if tokens.dim() == 3 else tokens[..., None]
            E, K, layers = experts.num_experts, experts.top_k, (len(self._blocks),)
            self._given = GivenRouting.of(x, ids, None, E=E, K=K, layers=layers)
        return args, kwargs

    def _after_model(self, *_: object) -> None:
        if self._given is not None and len(self._reached) < len(self._blocks):
            raise RuntimeError(
                f"routed_experts reached {len(self._reached)} of {len(self._blocks)} MoEs: blocks were not called, or "
                "are others than before; call replay_routing once the model is parallelized"
            )
        self._given = None

    def _before_block(self, layer: int, _: nn.Module, args: _Args, kwargs: _Kwargs) -> tuple[_Args, _Kwargs]:
        return args, kwargs if self._given is None else {**kwargs, _ARGUMENT: self._given.of_layer(layer)}

    def _after_router(self, layer: int, moe: Any, router: Any, _: object, output: tuple[Tensor, ...]) -> Any:
        weights_BLK, ids_BLK, scores_BLE = output
        given: GivenRouting | None = moe.routed_experts.given
        if given is not None:
            self._reached.add(layer)
            if given.expert_ids_TK is not None:
                ids_BLK = _put(given, ids_BLK)
                weights_BLK = scores_BLE.gather(-1, ids_BLK)
                if router.route_norm:
                    weights_BLK = weights_BLK / (weights_BLK.sum(-1, keepdim=True) + 1e-20)
                weights_BLK = weights_BLK * router.route_scale
        if recording():
            whole_BLK = ids_BLK.full_tensor() if isinstance(ids_BLK, DTensor) else ids_BLK
            add_to_records(moe.routed_experts, whole_BLK.flatten(0, 1), whole_BLK.shape[:2], NOTHING_GIVEN)
        return weights_BLK, ids_BLK, scores_BLE


def _take_given(experts: SonicEPRoutedExperts, _: nn.Module, args: _Args, kwargs: _Kwargs) -> tuple[_Args, _Kwargs]:
    """Hands what a block was given to its experts: once more in a recomputation."""
    experts.given = cast(GivenRouting | None, kwargs.pop(_ARGUMENT, None))
    return args, kwargs


def _put(given: GivenRouting, own_BLK: Tensor) -> Tensor:
    """Returns the given ids, and the router's own where none are given, sharded as the router's own are."""
    assert given.expert_ids_TK is not None
    ids_BLK = given.put(given.expert_ids_TK, UNSET).view(*given.shape, -1)
    if isinstance(own_BLK, DTensor):
        mesh = own_BLK.device_mesh
        ids_BLK = DTensor.from_local(ids_BLK, mesh, [Replicate()] * mesh.ndim, run_check=False)
        ids_BLK = ids_BLK.redistribute(placements=own_BLK.placements)
    return torch.where(ids_BLK == UNSET, own_BLK, ids_BLK)
