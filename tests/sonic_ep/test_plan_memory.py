"""The memory that `sonic-ep plan` promises, within 2 % of what was measured on GPUs: in records, and on those of this
machine. `pytest tests/sonic_ep/test_plan_memory.py -o log_cli=true -o log_cli_level=INFO` shows both numbers."""

import gc
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig, TransportConfig, load_config
from sonic_ep.cli.plan import (
    allocated_sizes,
    backward_stages,
    balanced_sizes,
    router_backward_bytes,
    router_bytes,
    saved_bytes,
    symmetric_buffers,
)
from sonic_ep.config import Buffers, TransportKind
from sonic_ep.dispatch.symmetric import SymmetricTransport
from sonic_ep.dispatch.symmetric_buffers import PeerBuffers
from sonic_ep.transports import GroupTransport
from tests.helpers.launch import RankPool

LOG = logging.getLogger(__name__)
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
TOKENS = {"sonic_7b": 24576, "qwen3_30b_a3b": 8192}
MIB = 2**20


def planned(config: MoEConfig, T: int, S: int, kind: TransportKind) -> dict[str, float]:
    """MiB: what is saved, the most of a backward besides, the router's part of it, and the buffers. bf16."""
    sizes = balanced_sizes(config, T, S)
    allocated = allocated_sizes(config, sizes, kind)
    saved = sum(saved_bytes(config, allocated, 2, kind).values()) + router_bytes(config, T, S)
    buffers = symmetric_buffers(config, allocated if config.transport.buffers == "static" else sizes, 2)
    router = router_backward_bytes(config, T)
    peak = saved + router + max(sum(stage) for stage in backward_stages(config, allocated, 2))
    found = {"saved": saved, "peak": peak, "router": router, "buffers": buffers if S > 1 else 0.0}
    return {name: value / MIB for name, value in found.items()}


def record(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


@pytest.mark.parametrize("name", ["local_moe_h200", "local_moe_other_gpus_h200"])
@pytest.mark.parametrize("shape", ["sonic_7b", "qwen3_30b_a3b"])
def test_records_of_one_gpu(name: str, shape: str) -> None:
    """Of a layer without rounding. They leave out x, and from the peak of backward all gradients. They are of launches
    that are not repeated: the router's backward begins when the experts' memory is free."""
    of_shape = record(name)["shapes"][shape]
    T, E, K, d, n = of_shape["sizes"]
    config = MoEConfig(d=d, n=n, E=E, K=K, rounding=RoundingConfig(mode="off"))
    expected, x, gradients = planned(config, T, 1, "all_to_all"), T * d * 2 / MIB, 3 * E * n * d * 2 / MIB
    found = of_shape["contestants"]["sonic_ep_layer"]
    assert found["kept_mib"] == pytest.approx(expected["saved"] - x, rel=0.02)
    peak = expected["peak"] - expected["router"] - gradients - 2 * x
    assert found["backward_peak_mib"] == pytest.approx(peak, rel=0.02)


@pytest.mark.parametrize("case", range(4))
def test_records_of_static_buffers_on_four_gpus(case: int) -> None:
    """Shared experts were left out there."""
    found = record("ep_layer_4_ranks_h200")["cases"][case]
    config, T = load_config(found["shape"]).replace(shared_n=0, shared_gate=False), found["T"]
    static = TransportConfig(buffers="static")
    config = config.replace(rounding=RoundingConfig(capacity_factor=1.25), transport=static)
    expected = planned(config, T, 4, "symmetric")["saved"] - T * config.d * 2 / MIB
    assert found["times"]["symmetric, static, with router"]["kept_mib"] == pytest.approx(expected, rel=0.02)


def config_of(name: str, buffers: Buffers) -> MoEConfig:
    config = load_config(name)
    if buffers == "exact":
        return config
    rounding = RoundingConfig(mode=config.rounding.mode, capacity_factor=1.25)
    return config.replace(rounding=rounding, transport=TransportConfig(buffers=buffers))


def measured(rank: int, name: str, buffers: Buffers, ranks: int) -> dict[str, float]:
    """MiB of a layer whose steps run as programs, as all do by default: saved between forward and backward, the most
    in backward, and the buffers over symmetric memory."""
    group = EPGroup() if ranks > 1 else EPGroup.alone()
    config, T = config_of(name, buffers), TOKENS[name]
    layer = MoE(config, group, seed=0, device="cuda", dtype=torch.bfloat16)
    dout = torch.randn(T, config.d, device="cuda", dtype=torch.bfloat16)
    x = torch.randn_like(dout).requires_grad_()
    for _ in range(4):
        torch.autograd.grad(layer(x).y, [x, *layer.parameters()], dout)
    assert layer.num_programs >= 1
    del x
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated() + dout.nbytes  # y is as large
    x = torch.randn_like(dout).requires_grad_()
    y = layer(x).y
    saved = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    grads = torch.autograd.grad(y, [x, *layer.parameters()], dout)
    peak = torch.cuda.max_memory_allocated() - before
    assert all(grad is not None for grad in grads)
    found = 0
    if ranks > 1:
        assert isinstance(layer.transport, GroupTransport)
        transport = layer.transport.on(x)
        assert isinstance(transport, SymmetricTransport)
        found = bytes_of(transport._buffers, config.d * 2)
    return {"saved": saved / MIB, "peak": peak / MIB, "buffers": found / MIB}


def bytes_of(buffers: PeerBuffers, row_bytes: int) -> int:
    lists = buffers.list_buffers
    assert lists is not None
    rows = buffers._rows[row_bytes]
    return 3 * rows.buffer_bytes + 20 * lists.capacity


def check(found: dict[str, float], expected: dict[str, float], what: str) -> None:
    shown = ", ".join(f"{name} {value:.1f} of {expected[name]:.1f} planned" for name, value in found.items())
    LOG.info("%s: MiB %s", what, shown)
    assert found["saved"] == pytest.approx(expected["saved"], rel=0.02), shown
    assert found["buffers"] == pytest.approx(expected["buffers"], rel=0.02), shown
    assert found["peak"] == pytest.approx(expected["peak"], rel=0.02), shown


@pytest.mark.gpu
@pytest.mark.parametrize("name", TOKENS)
def test_one_gpu(gpus: Callable[[int], RankPool], name: str) -> None:
    (found,) = gpus(1).run(measured, name, "exact", 1, timeout=600.0)
    check(found, planned(config_of(name, "exact"), TOKENS[name], 1, "all_to_all"), f"{name}, one GPU")


@pytest.mark.gpu
@pytest.mark.parametrize("buffers", ["exact", "static"])
@pytest.mark.parametrize("name", TOKENS)
def test_two_gpus(gpus: Callable[[int], RankPool], name: str, buffers: Buffers) -> None:
    for rank, found in enumerate(gpus(2).run(measured, name, buffers, 2, timeout=600.0)):
        expected = planned(config_of(name, buffers), TOKENS[name], 2, "symmetric")
        check(found, expected, f"{name}, {buffers} buffers, rank {rank} of 2")
