"""`batch_invariant=True`: a token's output and input gradient have the same bits in every batch, on any ranks."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig, RouterConfig, TransportConfig
from sonic_ep.config import TransportKind
from sonic_ep.functional import moe
from sonic_ep.routing import Routing
from sonic_ep.transports import transport_for
from tests.helpers.launch import RankPool

Ranks = Callable[[int], RankPool]

NUM_SPLITS, NUM_SPLITS_OF_RANKS = 200, 25
OFF = RoundingConfig(mode="off")
PLAIN = MoEConfig(d=32, n=24, E=16, K=4, init_std=0.3, rounding=OFF, batch_invariant=True)
# Widths that fill no vector of a CPU, and every part of the layer.
SIGMOID = RouterConfig(score="sigmoid", num_groups=4, groups_per_token=2, expert_bias=True, linear_bias=True, scale=2.5)
ALL = replace(PLAIN, E=12, K=3, router=SIGMOID, bias=True, shared_n=40, shared_gate=True, activation="swiglu_oai")
CONFIGS = {
    "plain": PLAIN,
    "all": ALL,
    "input": replace(ALL, router=replace(SIGMOID, linear_dtype="input"), activation="gelu", save_dispatched=True),
}
# On GPUs, with the kernels' widths.
LARGE = replace(PLAIN, d=256, n=128)
ON_GPUS = {
    "plain": LARGE,
    "all": replace(LARGE, E=12, K=3, router=SIGMOID, bias=True, shared_n=64, shared_gate=True),
    "input": replace(LARGE, router=RouterConfig(linear_dtype="input"), save_dispatched=True),
}
DTYPES = (torch.bfloat16, torch.float32)
IDS = ("bf16", "fp32")


def num_tokens(config: MoEConfig) -> int:
    """Returns how many tokens are split: more than a block has, on a CPU or on GPUs."""
    return 3000 if config.d == LARGE.d else 70


def tokens(config: MoEConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns x and the gradient of y for all tokens."""
    generator = torch.Generator().manual_seed(5)
    x, dy = (torch.randn(num_tokens(config), config.d, generator=generator).to(dtype) for _ in range(2))
    return x, dy


def built(config: MoEConfig, group: EPGroup, dtype: torch.dtype, device: str = "cpu") -> MoE:
    layer = MoE(config, group, seed=3, dtype=dtype)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for bias in (layer.router.bias, layer.router.expert_bias):
            if bias is not None:
                bias.copy_(0.3 * torch.randn(bias.shape, generator=generator))
        for bias in (layer.experts.b1, layer.experts.b2):
            if bias is not None:
                whole = torch.randn(config.E, bias.shape[1], generator=generator)
                bias.copy_(whole[layer.experts.first : layer.experts.first + layer.experts.num_local])
    return layer.to(device)


def step(layer: MoE, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Returns y and the gradient of x."""
    x = x.clone().requires_grad_()
    y = layer(x).y
    return y.detach(), torch.autograd.grad(y, x, dy)[0]


def differing_rows(
    rank: int, config: MoEConfig, dtype: torch.dtype, expected: tuple[Tensor, Tensor], splits: int
) -> int:
    """Returns the rows of y and dx that differ from `expected` in random splits of all tokens into batches of ranks."""
    device = expected[0].device.type
    group = EPGroup() if rank >= 0 else EPGroup.alone()
    layer = built(config, group, dtype, device)
    x, dy = (each.to(device) for each in tokens(config, dtype))
    generator = torch.Generator().manual_seed(17)  # the same on all ranks
    T, differ = num_tokens(config), 0
    for split in range(splits):
        order = torch.randperm(T, generator=generator)
        steps = 2 if split == 0 else 1 + split % 4
        cuts = torch.randint(0, T + 1, (steps * group.size - 1,), generator=generator).sort().values.tolist()
        if split == 0:  # a batch of one token
            cuts[:1] = [1]
            cuts = [max(1, cut) for cut in cuts]
        batches = [order[first:last] for first, last in itertools.pairwise([0, *cuts, T])]
        for number in range(len(batches) // group.size):
            mine = batches[number * group.size + max(rank, 0)].to(device)
            found = step(layer, x[mine], dy[mine])
            differ += sum(int((got != want[mine]).any(1).sum()) for got, want in zip(found, expected, strict=True))
    return differ


def whole_batch(config: MoEConfig, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Returns y and dx of all tokens in one batch of one rank."""
    x, dy = (each.to(device) for each in tokens(config, dtype))
    return step(built(config, EPGroup.alone(), dtype, device), x, dy)


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_no_bit_differs_in_random_splits_of_a_batch(config: MoEConfig, dtype: torch.dtype) -> None:
    assert differing_rows(-1, config, dtype, whole_batch(config, dtype), NUM_SPLITS) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("config", [PLAIN, CONFIGS["input"]], ids=["plain", "input"])
@pytest.mark.parametrize(
    ("num_ranks", "kind", "per_host"),
    [(2, "all_to_all", None), (4, "all_to_all", None), (2, "two_hop", 1), (4, "two_hop", 2)],
    ids=["2", "4", "2-hosts", "2-hosts-of-2"],
)
def test_no_bit_differs_across_ranks(
    ranks: Ranks, num_ranks: int, kind: TransportKind, per_host: int | None, config: MoEConfig, dtype: torch.dtype
) -> None:
    across = replace(config, transport=TransportConfig(kind=kind, ranks_per_host=per_host))
    results = ranks(num_ranks).run(differing_rows, across, dtype, whole_batch(config, dtype), NUM_SPLITS_OF_RANKS)
    assert results == [0] * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_bits_differ_without_it(ranks: Ranks, num_ranks: int) -> None:
    config = replace(PLAIN, batch_invariant=False, transport=TransportConfig(kind="all_to_all"))
    expected = whole_batch(config, torch.float32)
    assert sum(ranks(num_ranks).run(differing_rows, config, torch.float32, expected, 20)) > 0


def differing_rows_on_gpus(rank: int, config: MoEConfig) -> int:
    bf16 = torch.bfloat16
    return differing_rows(rank, config, bf16, whole_batch(config, bf16, "cuda"), NUM_SPLITS)


@pytest.mark.parametrize("as_programs", [True, False], ids=["programs", "code"])
@pytest.mark.parametrize("name", ON_GPUS)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_no_bit_differs_on_gpus(gpus: Ranks, num_ranks: int, name: str, as_programs: bool) -> None:
    config = replace(ON_GPUS[name], record_launches=as_programs)
    assert gpus(num_ranks).run(differing_rows_on_gpus, config, timeout=600) == [0] * num_ranks


@pytest.mark.gpu
def test_fp32_on_a_gpu_is_refused() -> None:
    layer = MoE(LARGE, dtype=torch.float32, device="cuda")
    with pytest.raises(
        ValueError, match=r"^batch_invariant=True with rows of torch.float32 on cuda, .*; use bf16 there"
    ):
        layer(torch.zeros(4, LARGE.d, device="cuda"))


def test_widths_without_blocks_are_refused() -> None:
    group = EPGroup.alone()
    transport = transport_for(group, TransportConfig(batch_invariant=True))
    routing = Routing.from_pairs(torch.tensor([0]), torch.tensor([0]), torch.ones(1), num_tokens=1, E=1, group=group)
    with pytest.raises(
        ValueError, match=r"^batch_invariant=True with rows of .* on cpu, d=12 and n=8: d and n must be"
    ):
        moe(
            *(torch.ones(1, 12), routing, torch.ones(1, 8, 12), torch.ones(1, 12, 8)),
            transport=transport,
            group=group,
            activation="silu",
        )


def test_compiled_layers_have_the_same_bits() -> None:
    layer, x = built(PLAIN, EPGroup.alone(), torch.float32), torch.randn(5, PLAIN.d)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x).y[:2], layer(x[:2]).y)
