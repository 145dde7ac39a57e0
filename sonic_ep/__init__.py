"""sonic_ep: expert-parallel Mixture-of-Experts training layers with distributed token rounding.

Public names are loaded at their first use, so that importing one kernel loads nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sonic_ep import checkpoint as checkpoint
    from sonic_ep.config import MoEConfig as MoEConfig
    from sonic_ep.config import RoundingConfig as RoundingConfig
    from sonic_ep.config import RouterConfig as RouterConfig
    from sonic_ep.config import TransportConfig as TransportConfig
    from sonic_ep.config import load_config as load_config
    from sonic_ep.cuda_graphs import graph_layers as graph_layers
    from sonic_ep.groups import EPGroup as EPGroup
    from sonic_ep.layer import MoE as MoE
    from sonic_ep.layer import MoEOutput as MoEOutput
    from sonic_ep.routers.given_routing import record_routing as record_routing
    from sonic_ep.routers.replay import replay_contexts as replay_contexts
    from sonic_ep.routers.stats import RoutingStats as RoutingStats
    from sonic_ep.routing import Routing as Routing

__version__ = "0.1.0"

_HOMES = {
    "EPGroup": "sonic_ep.groups",
    "MoE": "sonic_ep.layer",
    "MoEConfig": "sonic_ep.config",
    "MoEOutput": "sonic_ep.layer",
    "RouterConfig": "sonic_ep.config",
    "Routing": "sonic_ep.routing",
    "RoutingStats": "sonic_ep.routers.stats",
    "RoundingConfig": "sonic_ep.config",
    "TransportConfig": "sonic_ep.config",
    "graph_layers": "sonic_ep.cuda_graphs",
    "load_config": "sonic_ep.config",
    "record_routing": "sonic_ep.routers.given_routing",
    "replay_contexts": "sonic_ep.routers.replay",
}

__all__ = [
    "EPGroup",
    "MoE",
    "MoEConfig",
    "MoEOutput",
    "RouterConfig",
    "Routing",
    "RoutingStats",
    "RoundingConfig",
    "TransportConfig",
    "checkpoint",
    "graph_layers",
    "load_config",
    "record_routing",
    "replay_contexts",
]


def __getattr__(name: str) -> object:
    if name == "checkpoint":
        return import_module("sonic_ep.checkpoint")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'sonic_ep' has no attribute {name!r}")
