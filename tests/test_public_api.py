"""The exported names, pinned; and what importing the package may not pull in."""

import subprocess
import sys

import pytest

import sonic_ep

NAMES = {
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
}


def test_exported_names() -> None:
    assert set(sonic_ep.__all__) == NAMES
    for name in NAMES:
        assert getattr(sonic_ep, name) is not None


def test_unknown_names_raise() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = sonic_ep.nothing  # type: ignore[attr-defined]


def test_the_layer_imports_no_extra() -> None:
    extras = ("quack", "cutlass", "megatron", "deepspeed", "transformers", "transformer_engine")
    code = f"import sys, sonic_ep as s; s.MoE, s.checkpoint; print([m for m in {extras!r} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
