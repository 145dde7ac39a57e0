"""Experts behind a framework's router whose steps are programs compute, bit for bit, what their code computes."""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from sonic_ep import EPGroup, RoundingConfig, RouterConfig, TransportConfig
from sonic_ep.integrations.framework_experts import FrameworkExperts
from sonic_ep.integrations.rounded_routing import rounded_routing
from sonic_ep.integrations.topk_routing import config_of, routing_of_topk
from sonic_ep.kernels.lora.low_rank import ExpertsLoRA
from sonic_ep.routers.topk_pairs import GivenTopK, RouterCall
from sonic_ep.routing import Routing
from sonic_ep.transports import transport_for
from tests.helpers.launch import RankPool

Ranks = Callable[[int], RankPool]
T, D, N, E, K, R = 700, 256, 128, 16, 4, 8
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "main_grad": {"main_grad": True},
    "lora": {"lora": True},
    "adjacent": {"split": "adjacent"},
    "separate": {"split": "separate"},
    "up in front": {"split": "up in front"},
    "transposed": {"layout": "transposed", "bias": True},
    "concatenated": {"layout": "concatenated"},
    "rows": {"save_dispatched": True},
    "rounded": {"rounding": "apportion"},
    "padded": {"rounding": "pad"},
}
LEANS = [0, 0, 0, 0, 3, 0, 3, 3, 0]  # of a step: how much all tokens prefer the same experts


class Step(NamedTuple):
    """What a framework's router returned in a step, and the rows."""

    x_TH: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    scores_TE: Tensor


class Layer:
    """Weights of experts, with main_grad if asked for, and what a framework's router returns in a step.

    split: gate and up in two tensors, "adjacent" in one storage, also "up in front", or "separate" in two.
    rounding: its mode, or None for plain top-K.
    """

    def __init__(
        self,
        group: EPGroup,
        device: str,
        *,
        main_grad: bool = False,
        bias: bool = False,
        lora: bool = False,
        split: str | None = None,
        layout: str = "interleaved",
        rounding: Any = None,
    ) -> None:
        self.rounding = rounding
        self.group, self.device, self.main_grad, self.split = group, device, main_grad, split
        self.layout = layout
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float64
        self.transport = transport_for(group, TransportConfig())
        e, generator = E // group.size, torch.Generator().manual_seed(group.rank)

        def weight(*size: int) -> Tensor:
            return (torch.randn(size, generator=generator) / size[-1] ** 0.5).to(device, self.dtype)

        sizes = [(e, 2 * N, D), (e, D, N), *([(e, 2 * N), (e, D)] if bias else [])]
        if layout == "transposed":
            sizes[:2] = (e, D, 2 * N), (e, N, D)
        if split is not None:
            sizes = [(e, N, D), (e, D, N), (e, N, D)]
        storage = torch.cat([weight(*size).flatten() for size in sizes])  # one, as under Megatron's DDP
        parts = storage.split([torch.Size(size).numel() for size in sizes])
        parts = [part.clone() for part in parts] if split == "separate" else parts
        parts = parts[::-1] if split == "up in front" else parts  # all of one size
        self.weights = [part.view(size).requires_grad_() for part, size in zip(parts, sizes, strict=True)]
        shapes = [(e, R, D), (e, 2 * N, R), (e, R, N), (e, D, R)] if lora else []
        self.updates = [weight(*shape).requires_grad_() for shape in shapes]
        self.hooks_called, this = 0, weakref.proxy(self)  # no cycle through autograd, which no collector frees
        for param in self.weights[: 2 * main_grad]:
            param.main_grad = torch.zeros_like(param, dtype=torch.float32)  # type: ignore[attr-defined]
            param.register_post_accumulate_grad_hook(lambda param: this._note(param))

    def _note(self, param: Tensor) -> None:
        assert param.grad_added_to_main_grad  # type: ignore[attr-defined]
        self.hooks_called += 1
        param.grad = None

    def step(self, step: int, lean: float, num_tokens: int = T) -> Step:
        generator = torch.Generator().manual_seed(2 * step + self.group.rank)
        scores_TE = torch.randn(num_tokens, E, generator=generator) + lean * torch.linspace(0, 2, E)
        scores_TE = scores_TE.softmax(1).to(self.device)
        weights_TK, ids_TK = scores_TE.topk(K)
        x_TH = torch.randn(num_tokens, D, generator=generator).to(self.device, self.dtype)
        return Step(x_TH.requires_grad_(), ids_TK, weights_TK.requires_grad_(), scores_TE.requires_grad_())

    def routing(self, step: Step, runs_as: Any) -> Routing:
        call = RouterCall(group=self.group, exchange=self.transport, dtype=self.dtype, training=True)
        if self.rounding is None:
            return routing_of_topk(step.ids_TK, step.weights_TK, E=E, call=call, runs_as=runs_as)
        config = config_of(E, K, RouterConfig(), RoundingConfig(mode=self.rounding, G=128))
        given = GivenTopK(step.ids_TK, step.weights_TK, step.scores_TE, None)
        return rounded_routing(self, given, config, call, runs_as=runs_as)

    def compute(self, experts: FrameworkExperts, step: Step) -> Tensor:
        biases: Any = [None, None] if self.split else [*self.weights[2:], None, None][:2]
        runs_as = experts.begin(step.x_TH)
        return experts(
            step.x_TH,
            self.routing(step, runs_as),
            (self.weights[0], self.weights[1], *biases),
            runs_as,
            up_eIH=self.weights[2] if self.split else None,
            lora=ExpertsLoRA(*self.updates) if self.updates else None,
            accumulate_into_main_grad=self.main_grad,
            layout=self.layout,
        )

    def run(self, experts: FrameworkExperts, step: Step) -> list[Tensor]:
        """Output and all gradients of a step, in memory that was NaN before."""
        if self.device == "cuda":
            torch.full((20_000_000,), float("nan"), device="cuda")
        for weight in (*self.weights, *self.updates):
            weight.grad = None
        y = self.compute(experts, step)
        (y * y).sum().backward()
        found = [y.detach(), step.x_TH.grad, step.weights_TK.grad]
        found += [] if self.rounding is None else [step.scores_TE.grad]
        for index, weight in enumerate(self.weights):
            added = self.main_grad and index < 2
            found.append(weight.main_grad if added else weight.grad)  # type: ignore[attr-defined]
        found += [update.grad for update in self.updates]
        assert all(each is not None and bool(each.isfinite().all()) for each in found)
        return [each.clone() for each in found if each is not None]


def differing(rank: int, device: str, options: dict[str, Any]) -> tuple[list[str], int]:
    """Steps in which programs differ from the code, and the number of programs."""
    group = EPGroup() if torch.distributed.is_initialized() else EPGroup.alone()
    options = {**options}
    saves = options.pop("save_dispatched", False)
    layers = [Layer(group, device, **options) for _ in range(2)]
    experts, code = (
        FrameworkExperts(group, layers[0].transport, K, save_dispatched=saves, as_programs=runs)
        for runs in (True, False)
    )
    wrong = []
    for step, lean in enumerate(LEANS):
        num_tokens = T - 50 * (step % 3)
        program = layers[0].run(experts, layers[0].step(step, lean, num_tokens))
        expected = layers[1].run(code, layers[1].step(step, lean, num_tokens))
        pairs = zip(program, expected, strict=True)
        wrong += [f"{step} {i}" for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
    assert [layer.hooks_called for layer in layers] == [2 * len(LEANS) * layers[0].main_grad] * 2
    return wrong, experts.num_programs


@pytest.mark.gpu
@pytest.mark.parametrize("option", OPTIONS)
def test_programs_on_one_gpu(option: str) -> None:
    before = torch.cuda.max_memory_allocated()
    wrong, num_programs = differing(0, "cuda", OPTIONS[option])
    assert wrong == []
    assert 1 <= num_programs <= 3
    # An operand that spans split weights has a stride of their distance in every row: it is no memory to allocate.
    assert torch.cuda.max_memory_allocated() - before < 2**30


@pytest.mark.gpu
@pytest.mark.parametrize("option", OPTIONS)
def test_programs_on_two_gpus(gpus: Ranks, option: str) -> None:
    for wrong, num_programs in gpus(2).run(differing, "cuda", OPTIONS[option]):
        assert wrong == []
        assert 1 <= num_programs <= 4


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_main_grads_of_another_dtype(device: str) -> None:
    layers = [Layer(EPGroup.alone(), device, main_grad=True) for _ in range(2)]
    group, transport = EPGroup.alone(), layers[0].transport
    experts, code = (FrameworkExperts(group, transport, K, as_programs=runs) for runs in (True, False))
    for dtype in (torch.float32, layers[0].dtype):
        for layer in layers:
            for param in layer.weights[:2]:
                param.main_grad = torch.zeros_like(param, dtype=dtype)  # type: ignore[attr-defined]
        for step in range(4):
            program = layers[0].run(experts, layers[0].step(step, 0))
            expected = layers[1].run(code, layers[1].step(step, 0))
            assert [torch.equal(*pair) for pair in zip(program, expected, strict=True)] == [True] * len(expected)


@pytest.mark.parametrize("option", OPTIONS)
def test_without_a_gpu_the_code_runs(ranks: Ranks, option: str) -> None:
    assert ranks(2).run(differing, "cpu", OPTIONS[option]) == [([], 0)] * 2
