"""A layer's step is traced once, and its programs serve many sizes; on a CPU that imitates a GPU (fake_cuda.py)."""

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sonic_ep import MoEConfig, RoundingConfig, RouterConfig, load_config
from sonic_ep.steps import layer_step
from sonic_ep.steps.layer_step import StepCall, run
from sonic_ep.steps.programs import StepPrograms
from sonic_ep.steps.router_trace import Kind
from tests.helpers.fake_cuda import Memory, Shape, described, fake_cuda, kind_of

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = "sonic_ep", "kernels", "dispatch", "routers"
Sizes = tuple[int, ...]  # T, L; on several ranks also M, P, V and the order of backwards, see Kind.usual_sizes

PLAIN = replace(load_config("sonic_7b"), rounding=RoundingConfig(mode="off"))
NEAREST = replace(PLAIN, rounding=RoundingConfig(mode="nearest"))
CONFIGS = {
    "off": PLAIN,
    "nearest": replace(load_config("qwen3_30b_a3b"), rounding=RoundingConfig(mode="nearest")),
    "apportion": replace(load_config("qwen3_30b_a3b"), rounding=RoundingConfig(mode="apportion")),
    "pad": replace(PLAIN, rounding=RoundingConfig(mode="pad")),
    "capacity": replace(PLAIN, rounding=RoundingConfig(mode="nearest", capacity_factor=1.25)),
    "bias": replace(NEAREST, router=RouterConfig(expert_bias=True)),
    "losses": replace(NEAREST, router=RouterConfig(balance="batch", balance_coef=0.01, z_loss_coef=0.001)),
    "groups": replace(PLAIN, router=RouterConfig(score="sigmoid", num_groups=8, groups_per_token=4)),
    "biases": replace(NEAREST, bias=True, router=RouterConfig(linear_bias=True)),
    "sequence": replace(NEAREST, router=RouterConfig(balance="sequence", balance_coef=0.01)),
    "global": replace(NEAREST, router=RouterConfig(balance="global", balance_coef=0.01, expert_bias=True)),
    "rows": replace(NEAREST, save_dispatched=True),
    "batch-invariant": replace(PLAIN, batch_invariant=True),
}


@pytest.fixture
def memory() -> Iterator[Memory]:
    with fake_cuda() as memory:
        yield memory


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("name", "training"), [*[(name, True) for name in CONFIGS], ("off", False), ("apportion", False)]
)
def test_a_program_of_other_sizes_is_the_one_that_these_would_give(name: str, training: bool, num_ranks: int) -> None:
    kind = kind_of(CONFIGS[name], num_ranks, training=training)
    for traced, other in (
        ((8192, 4096, 8192, 70_000, 70_000, 5), (7008, 3504, 7100, 60_001, 61_003, 8)),
        ((640, 320, 700, 6000, 6000, 0), (3008, 1504, 3010, 30_100, 30_001, 3)),
    ):
        length = len(kind.usual_sizes)
        one, two = (layer_step.traced(kind, sizes[:length]) for sizes in (traced, other))
        assert one.forward.fits(*other[:length])
        assert one.backward.keys() == two.backward.keys() == ({False, True} if training else set())
        passes = [(one.forward, two.forward), *zip(one.backward.values(), two.backward.values(), strict=True)]
        for found, wanted in passes:
            assert described(found, other[:length]) == described(wanted, other[:length])


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(
    ("name", "num_ranks", "most"),
    [("off", 1, 6), ("off", 2, 8), ("losses", 2, 16)],  # the losses' kernel is one of two, by whether 16 divides L
)
def test_few_programs_serve_all_lengths(name: str, num_ranks: int, most: int) -> None:
    kind, step = kind_of(CONFIGS[name], num_ranks), StepPrograms(layer_step.traced)
    for T in (*range(1, 40), *range(40, 9001, 61)):
        rows = -(-8 * T // 128) * 128 + 8192
        assert step.find(kind, (T, T, T, rows, rows, -1)[: len(kind.usual_sizes)]) is not None
    assert 1 < step.num_programs <= most


def test_a_step_that_cannot_be_traced_runs_the_code(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    kind, step = kind_of(PLAIN), StepPrograms(layer_step.traced)
    with (
        patch.object(step, "_traced", side_effect=AttributeError("no such method")) as traced,
        caplog.at_level(logging.WARNING, "sonic_ep.launches"),
    ):
        assert [step.find(kind, (T, T)) for T in (512, 512, 8)] == [None] * 3
    assert traced.call_count == 1
    assert [(each.name, each.levelname) for each in caplog.records] == [("sonic_ep.launches", "WARNING")]
    assert step.num_programs == 0
    assert step.find(kind_of(PLAIN), (512, 512)) is not None


class Inputs(NamedTuple):
    x_TH: Tensor
    router: Tensor
    w1: Tensor
    w2: Tensor


def inputs(kind: Kind, T: int) -> Inputs:
    c, e = kind.config, kind.config.E // (1 if kind.ranks is None else kind.ranks.group.size)
    shapes = (T, c.d), (c.E, c.d), (e, 2 * c.n, c.d), (e, c.d, c.n)
    dtypes = kind.dtype, *kind.router, kind.dtype, kind.dtype
    found = (torch.empty(*s, dtype=t, requires_grad=True) for s, t in zip(shapes, dtypes, strict=True))
    return Inputs(*found)


@pytest.mark.parametrize("config", [PLAIN, CONFIGS["nearest"]], ids=lambda config: config.name)
def test_memory_of_a_step(memory: Memory, config: MoEConfig) -> None:
    kind, step = kind_of(config, 2), StepPrograms(layer_step.traced)
    T, P, d, n, e = 8192, 70_000, config.d, config.n, config.E // 2
    sizes, extra = (T, T, T, P, P, 0), {"regions": torch.zeros(2, dtype=torch.int64)}
    allocated = list[Shape]()
    memory.on_allocate = allocated.append
    given = inputs(kind, T)
    programs = step.find(kind, sizes)
    assert programs is not None
    y_TH, loss, _ = run(programs, kind, sizes, StepCall(extra=extra), *given)
    assert {(P, 2 * n), (P, n), (P, d), (T, d)} <= {*allocated}  # H, A, Y, y

    graph: Any = y_TH.grad_fn
    h = next(each for each in graph.saved_tensors if each.shape == (P, 2 * n))
    h = StorageWeakRef(h.untyped_storage())
    allocations = dict[Shape, tuple[bool, list[Shape]]]()  # by shape, whether H was free, and what backward still had

    def note(shape: Shape) -> None:
        allocations[shape] = h.expired(), [*memory.live.values()]

    memory.live.clear()
    memory.on_allocate = note
    dy_TH, dloss = torch.empty_like(y_TH), torch.empty_like(loss)
    grads = torch.autograd.grad([y_TH, loss], given, [dy_TH, dloss])
    assert [each.shape for each in grads] == [each.shape for each in given]
    assert {(P, 2 * n), (P, n), (P, d), (T, d), (e, 2 * n, d), (e, d, n)} <= {*allocations}
    is_free, _ = allocations[P, 2 * n]  # dH, computed from H
    assert not is_free
    is_free, _ = allocations[P, d]  # dX of all pairs
    assert is_free
    _, others = allocations[e, 2 * n, d]  # dW1
    assert (P, n) not in others  # A'
    assert (P, 2 * n) in others


@pytest.mark.parametrize("training", [True, False])
def test_a_step_without_gradients_keeps_its_outputs_alone(memory: Memory, training: bool) -> None:
    kind, T = kind_of(NEAREST, training=training), 512
    kind = replace(kind, needs=(False,) * len(kind.needs))
    programs = layer_step.traced(kind, (T, T))
    given = inputs(kind, T)
    with torch.no_grad():
        y_TH, loss, statistics = run(programs, kind, (T, T), StepCall(), *given)
    outputs = y_TH, loss, *statistics[:2]  # the counts are views of another tensor
    assert Counter(memory.live.values()) == Counter(tuple(each.shape) for each in outputs)


def calls_of(function: Callable[[], object]) -> tuple[int, Counter[str]]:
    """The number of calls of Python functions of the product in this call, and those by file. Not those of C, torch,
    the standard library, and the tests."""
    files = Counter[str]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and any(path.is_relative_to(ROOT / folder) for folder in PRODUCT):
            files[str(path.relative_to(ROOT))] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return files.total(), files


@pytest.mark.usefixtures("memory")
def test_a_step_calls_little_python() -> None:
    """Counts calls of functions of ours, from `find` on, in a step whose program there is."""
    config = MoEConfig(d=256, n=128, E=16, K=4, rounding=RoundingConfig(mode="nearest"))
    kind, step, T = kind_of(config), StepPrograms(layer_step.traced), 512
    given, dy_TH = inputs(kind, T), torch.empty(T, config.d, dtype=torch.bfloat16)

    def forward() -> Tensor:
        programs = step.find(kind, (T, T))
        assert programs is not None
        return run(programs, kind, (T, T), StepCall(), *given)[0]

    torch.autograd.grad(forward(), given, dy_TH)
    y_TH: Tensor = forward()
    for name, function in (("forward", forward), ("backward", lambda: torch.autograd.grad(y_TH, given, dy_TH))):
        number, files = calls_of(function)
        print(f"{name}: {number} calls in {len(files)} files: {dict(files)}")  # noqa: T201
        assert 0 < number <= 200, files
        assert 0 < len(files) <= 25, files
