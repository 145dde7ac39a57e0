"""The overrides that torchtitan finds by their names in `override.imports`.

`routed_experts` replaces RoutedExperts.Config, the smallest node that holds both dispatch and experts. So the MoE with
its router, expert bias, token counts and shared experts stays torchtitan's, and other overrides may replace its parts.
Rounding needs the router's scores, so `rounded_moe` replaces the node above, MoE.Config, and leaves its class as it is.

Source: pytorch/torchtitan, torchtitan/config/override.py.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torchtitan.config.override import derive, override
from torchtitan.models.common.moe import MoE, RoutedExperts

from sonic_ep.config import RoundingConfig, TransportConfig
from sonic_ep.integrations.options import SonicEPOptions
from sonic_ep.integrations.torchtitan.routed_experts import SonicEPRoutedExperts
from sonic_ep.integrations.torchtitan.router import ScoringRouter, router_config_of

Fields = Mapping[str, Any]  # of a config, by name


@override(target=RoutedExperts.Config, description="Dispatch, experts and combine by sonic_ep.")
def routed_experts(
    config: RoutedExperts.Config,
    *,
    transport: Fields | None = None,
    save_dispatched: bool = False,
    record_launches: bool = True,
    batch_invariant: bool = False,
) -> SonicEPRoutedExperts.Config:
    """Returns the config of the same experts, computed here.

    transport: the fields of a TransportConfig. save_dispatched, record_launches, batch_invariant: see SonicEPOptions.

    Raises ValueError for experts or a token dispatcher that are not torchtitan's plain ones, TypeError for fields that
    are not known.
    """
    options = SonicEPOptions(
        transport=TransportConfig(**(transport or {})),
        save_dispatched=save_dispatched,
        record_launches=record_launches,
        batch_invariant=batch_invariant,
    )
    return derive(config, SonicEPRoutedExperts.Config, options=options)


@override(target=MoE.Config, description="Dispatch, experts and combine by sonic_ep, with token rounding.")
def rounded_moe(
    config: MoE.Config,
    *,
    rounding: Fields | None = None,
    transport: Fields | None = None,
    save_dispatched: bool = False,
    record_launches: bool = True,
) -> MoE.Config:
    """Returns the config of the same MoE, with experts computed here and, in training, a rounded routing.

    rounding: the fields of a RoundingConfig; default: its own. The others: as in `routed_experts`.

    Raises ValueError as `routed_experts` does, and for a router that is not torchtitan's plain one.
    """
    options = SonicEPOptions(
        rounding=RoundingConfig(**(rounding or {})),
        transport=TransportConfig(**(transport or {})),
        save_dispatched=save_dispatched,
        record_launches=record_launches,
    )
    experts = derive(
        config.routed_experts,
        SonicEPRoutedExperts.Config,
        options=options,
        router=router_config_of(config.router),
    )
    return dataclasses.replace(config, router=derive(config.router, ScoringRouter.Config), routed_experts=experts)
