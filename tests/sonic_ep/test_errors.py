"""Every rank raises, none hangs: bad construction and bad input, with real processes."""

from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig, RouterConfig
from sonic_ep import layer as layer_module
from tests.helpers.errors import message_of
from tests.helpers.launch import RankPool

Ranks = Callable[[int], RankPool]
SIZES = {"d": 8, "n": 4, "E": 8, "K": 2}


def construct(rank: int, changes: list[dict[str, object]], seeds: list[int | None]) -> str:
    config = MoEConfig(**{**SIZES, **changes[rank]})  # type: ignore[arg-type]
    return message_of(lambda: MoE(config, EPGroup(), seed=seeds[rank]))


def test_experts_must_divide_over_the_ranks(ranks: Ranks) -> None:
    for message in ranks(4).run(construct, [{"E": 6}] * 4, [0] * 4):
        assert "E=6 experts cannot be divided over ep_size=4 ranks" in message
        assert "a size that divides 6" in message


def test_ranks_that_disagree_about_the_config_all_hear_of_it(ranks: Ranks) -> None:
    for message in ranks(2).run(construct, [{}, {"K": 3, "n": 5}], [0, 0]):
        assert "disagree" in message
        assert "K: 2 on rank 0, 3 on rank 1" in message
        assert "n: 4 on rank 0, 5 on rank 1" in message


def test_ranks_that_disagree_about_the_seed_all_hear_of_it(ranks: Ranks) -> None:
    for message in ranks(2).run(construct, [{}, {}], [0, 1]):
        assert "seed: 0 on rank 0, 1 on rank 1" in message


def test_e_that_differs_and_does_not_divide_still_raises_on_all(ranks: Ranks) -> None:
    assert all("no error" != message for message in ranks(2).run(construct, [{"E": 8}, {"E": 7}], [0, 0]))


def random_router(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(rank)
    layer = MoE(MoEConfig(**SIZES), EPGroup())  # type: ignore[arg-type]
    return layer.router.weight.detach(), layer.experts.w1.detach()


def test_without_a_seed_the_first_ranks_draw_serves_all(ranks: Ranks) -> None:
    (router0, w0), (router1, w1) = ranks(2).run(random_router)
    assert torch.equal(router0, router1)
    assert not torch.equal(w0, w1)  # other experts


def initial_weights(rank: int) -> dict[str, torch.Tensor]:
    layer = MoE(MoEConfig(**SIZES, bias=True, shared_n=4), EPGroup(), seed=7)  # type: ignore[arg-type]
    return {name: p.detach() for name, p in layer.named_parameters()}


def test_weights_initialise_alike_for_every_ep_size(ranks: Ranks) -> None:
    wanted = {n: p for n, p in MoE(MoEConfig(**SIZES, bias=True, shared_n=4), seed=7).named_parameters()}  # type: ignore[arg-type]
    for ep_size in (2, 4):
        found = ranks(ep_size).run(initial_weights)
        for name, value in wanted.items():
            parts = [f[name] for f in found]
            got = torch.cat(parts) if name.startswith("experts.") else parts[-1]
            assert torch.equal(got, value), name
    assert wanted["experts.w1"].std() > 0.01
    assert not torch.equal(wanted["experts.w1"][0], wanted["experts.w1"][1])


def as_inference(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.clone()


def as_fake(x: torch.Tensor) -> object:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        return mode.from_tensor(x)


BAD_INPUTS: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "inference": (as_inference, "x is an inference tensor, which autograd cannot save; use x.clone(), or call this"),
    "fake": (as_fake, "x is a FakeTensor, with operations of its own; give a plain torch.Tensor"),
    "lazy": (lambda x: nn.UninitializedParameter(), "x is a UninitializedParameter without a shape; give a plain"),
    "wrapped": (torch._to_functional_tensor, "x is held by a transform of torch.func that has ended; give a plain"),
    "width": (lambda x: x[:, :-1], "x has hidden size 7 (shape (10, 7)), the layer has d=8"),
    "dims": (lambda x: x[0], "x has shape (8,), wanted (T, d) or (B, L, d)"),
    "dtype": (lambda x: x.double(), "x has dtype torch.float64, the experts compute in torch.float32"),
    "device": (lambda x: x.to("meta"), "x is on meta, the layer's weights on cpu"),
    "token ids": (lambda x: x.long(), "x has dtype torch.int64, wanted torch.float32: hidden states, not token ids"),
    "type": (lambda x: x.tolist(), "x must be a torch.Tensor, got list"),
    "sparse": (lambda x: x.to_sparse(), "x has layout torch.sparse_coo, wanted a dense tensor"),
    "nested": (
        lambda x: torch.nested.as_nested_tensor([x], layout=torch.jagged),
        "x has layout nested, wanted a dense tensor",
    ),
}


def feed(rank: int, kind: str, bad_rank: int) -> tuple[str, str]:
    """The message of a call that one rank spoils; then a good call must work again."""
    layer = MoE(MoEConfig(**SIZES), EPGroup(), seed=0)  # type: ignore[arg-type]
    x = torch.randn(10, 8)
    bad = BAD_INPUTS[kind][0](x) if rank == bad_rank else x
    message = message_of(lambda: layer(bad))
    return message, message_of(lambda: layer(x).y.sum().backward())


@pytest.mark.parametrize("kind", BAD_INPUTS)
def test_one_ranks_bad_input_raises_on_all_and_harms_no_later_call(ranks: Ranks, kind: str) -> None:
    for message, afterwards in ranks(4).run(feed, kind, 2):
        assert BAD_INPUTS[kind][1] in message
        assert "rank 2: " in message
        assert afterwards == "no error"


@pytest.mark.parametrize("kind", BAD_INPUTS)
def test_bad_input_on_one_rank_alone(kind: str) -> None:
    layer = MoE(MoEConfig(**SIZES), seed=0)  # type: ignore[arg-type]
    message = message_of(lambda: layer(BAD_INPUTS[kind][0](torch.randn(10, 8))))  # type: ignore[arg-type]
    assert BAD_INPUTS[kind][1] in message


def spoil(layer: MoE, kind: str) -> None:
    w2 = layer.experts.w2
    match kind:
        case "strides":
            w2.data = w2.data.mT.contiguous().mT
        case "dtype":
            assert layer.shared is not None
            layer.shared.double()
        case "device":
            layer.router.to_empty(device="meta")
        case "meta":
            layer.to_empty(device="meta")
        case "shape":
            w2.data = w2.data[:-1].clone()
        case "router":
            layer.router.weight.data = layer.router.weight.data[:, :-1].clone()
        case "no columns":
            layer.router.weight.data = torch.empty(8, 0)
        case "bias":
            layer.router.expert_bias = torch.zeros(7)
        case "bias on meta":
            layer.router.expert_bias = torch.zeros(8, device="meta")


BAD_WEIGHTS = {
    "strides": "rank 1: experts.w2 is not contiguous (strides (32, 1, 8)); set it to experts.w2.contiguous()",
    "dtype": "is torch.float64, experts.w1 torch.float32; cast one of them",
    "device": "rank 1: router.weight is on meta, experts.w1 on cpu; move one of them",
    "meta": "rank 1: x is on cpu, the layer's weights on meta; move one of them",
    "shape": "rank 1: experts.w2 has shape (3, 8, 4), wanted (4, 8, 4)",
    "router": "rank 1: router.weight has shape (8, 7), wanted (8, 8)",
    "no columns": "rank 1: router.weight has shape (8, 0), wanted (8, 8)",
}


def with_bad_weights(rank: int, kind: str, router: RouterConfig, steps: int = 0) -> str:
    """steps: before the weights are bad."""
    layer = MoE(MoEConfig(**SIZES, shared_n=4, router=router), EPGroup(), seed=0)  # type: ignore[arg-type]
    for _ in range(steps):
        layer(torch.randn(10, 8)).y.sum().backward()
    if rank == 1:
        spoil(layer, kind)
    return message_of(lambda: layer(torch.randn(10, 8)))


BAD_BUFFERS = {
    "bias": "rank 1: router.expert_bias has shape (7,), wanted (8,)",
    "bias on meta": "rank 1: router.expert_bias is on meta, experts.w1 on cpu; move one of them",
}


@pytest.mark.parametrize("kind", BAD_BUFFERS)
def test_one_ranks_bad_buffer_raises_on_all(ranks: Ranks, kind: str) -> None:
    for message in ranks(2).run(with_bad_weights, kind, RouterConfig(expert_bias=True)):
        assert BAD_BUFFERS[kind] in message


@pytest.mark.parametrize("kind", BAD_WEIGHTS)
@pytest.mark.parametrize("expert_bias", [False, True])
def test_one_ranks_bad_weights_raise_on_all(ranks: Ranks, kind: str, expert_bias: bool) -> None:
    for message in ranks(2).run(with_bad_weights, kind, RouterConfig(expert_bias=expert_bias)):
        assert BAD_WEIGHTS[kind] in message


@pytest.mark.parametrize("kind", BAD_WEIGHTS)
def test_one_ranks_weights_that_go_bad_later_raise_on_all(ranks: Ranks, kind: str) -> None:
    """With weights on another device, that rank must not choose a transport for it, which is a collective."""
    for message in ranks(2).run(with_bad_weights, kind, RouterConfig(), 2):
        assert BAD_WEIGHTS[kind] in message


def gone_to_the_cpu(rank: int, what: str) -> tuple[str, str]:
    """The message where rank 1 has the layer, or x, on the CPU, after steps on GPUs; then a step there must work."""
    config = MoEConfig(d=64, n=32, E=8, K=2)
    layer = MoE(config, EPGroup(), seed=0, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(10, 64, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        layer(x).y.sum().backward()
    if rank == 1 and what == "layer":
        layer.cpu()
    message = message_of(lambda: layer(x.cpu() if rank == 1 and what == "x" else x))
    layer.cuda()
    return message, message_of(lambda: layer(x).y.sum().backward())


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["layer", "x"])
def test_a_layer_or_rows_on_the_cpu_on_one_rank(gpus: Ranks, what: str) -> None:
    for message, afterwards in gpus(2).run(gone_to_the_cpu, what):
        assert message.startswith(
            "rank 1: x is on cuda:1, the layer's weights on cpu" if what == "layer" else "rank 1: x"
        )
        assert "; move one of them" in message
        assert afterwards == "no error"


def test_what_a_layer_is_made_of_has_its_type(tmp_path: Path) -> None:
    config = MoEConfig(**SIZES)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"config is a dict, wanted a MoEConfig"):
        MoE(SIZES)  # type: ignore[arg-type]
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        with pytest.raises(TypeError, match=r"group is a ProcessGroup, wanted an EPGroup: EPGroup\(process_group\)"):
            MoE(config, dist.group.WORLD)  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()
    assert torch.equal(MoE(config, seed=numpy.int64(3)).experts.w1, MoE(config, seed=3).experts.w1)  # type: ignore[arg-type]


WRONG_TYPES: dict[str, tuple[dict[str, object], str]] = {
    "config": ({"config": SIZES}, "rank 1: config is a dict, wanted a MoEConfig"),
    "seed": ({"seed": 0.5}, "rank 1: seed=0.5 is a float, wanted an integer"),
    "text as seed": ({"seed": "7"}, "rank 1: seed='7' is a str, wanted an integer"),
    "device": ({"device": 1.5}, "rank 1: device=1.5 is a float, wanted a torch.device or its name"),
    "dtype": ({"dtype": "float32"}, "rank 1: dtype='float32' is no floating-point torch.dtype"),
    "integers": ({"dtype": torch.int64}, "rank 1: dtype=torch.int64 is no floating-point torch.dtype"),
}


def of_wrong_type(rank: int, kind: str) -> str:
    arguments: dict[str, object] = {"config": MoEConfig(**SIZES), "seed": 0}  # type: ignore[arg-type]
    arguments |= WRONG_TYPES[kind][0] if rank == 1 else {}
    try:
        MoE(group=EPGroup(), **arguments)  # type: ignore[arg-type]
    except TypeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("kind", WRONG_TYPES)
def test_an_argument_of_another_type_on_one_rank(ranks: Ranks, kind: str) -> None:
    for message in ranks(2).run(of_wrong_type, kind):
        assert WRONG_TYPES[kind][1] in message


def without_backward(rank: int, kind: str) -> tuple[str, str]:
    """The message where rank 1 needs no backward; then a step with one must work."""
    layer, x = MoE(MoEConfig(**SIZES), EPGroup(), seed=0), torch.randn(10, 8)  # type: ignore[arg-type]
    if kind == "frozen":
        layer.requires_grad_(rank == 0)
    with torch.set_grad_enabled(rank == 0 or kind == "frozen"):
        message = message_of(lambda: layer(x))
    layer.requires_grad_(True)
    return message, message_of(lambda: layer(x).y.sum().backward())


@pytest.mark.parametrize("kind", ["no_grad", "frozen"])
def test_one_rank_without_a_backward(ranks: Ranks, kind: str) -> None:
    for message, afterwards in ranks(2).run(without_backward, kind):
        assert "disagree whether this training step has a backward (rank 0: yes, rank 1: no)" in message
        assert afterwards == "no error"


def updated_on_one_rank(rank: int) -> tuple[str, str, str]:
    """Messages of a step before, after an update on rank 1 alone, and after the other rank's."""
    config = MoEConfig(**SIZES, router=RouterConfig(expert_bias=True))  # type: ignore[arg-type]
    layer, x = MoE(config, EPGroup(), seed=0), torch.randn(10, 8)
    messages = [message_of(lambda: layer(x))]
    for updating in (1, 0):
        if rank == updating:
            layer.update_expert_bias()
        messages.append(message_of(lambda: layer(x).y.sum().backward()))
    return messages[0], messages[1], messages[2]


def test_a_bias_that_one_rank_alone_updates(ranks: Ranks) -> None:
    for before, differing, after in ranks(2).run(updated_on_one_rank):
        assert "how often the expert bias was updated since it was set or loaded (rank 0: 0, rank 1: 1)" in differing
        assert before == after == "no error"


UNUSABLE: dict[str, tuple[dict[str, object], str]] = {
    "no device type": ({"device": "nowhere"}, "rank 1: device='nowhere' cannot be used on this rank ("),
    "no such device": ({"device": "cuda:77"}, "rank 1: device='cuda:77' cannot be used on this rank ("),
    "dtype": ({"dtype": torch.float8_e5m2}, "rank 1: dtype=torch.float8_e5m2 is not supported; use one of torch.float"),
}


def with_unusable(rank: int, kind: str) -> tuple[str, str]:
    """The message of a layer that rank 1 cannot have; then one that all can have must work."""
    config, arguments = MoEConfig(**SIZES), UNUSABLE[kind][0] if rank == 1 else {}  # type: ignore[arg-type]
    message = message_of(lambda: MoE(config, EPGroup(), seed=0, **arguments))  # type: ignore[arg-type]
    return message, message_of(lambda: MoE(config, EPGroup(), seed=0)(torch.randn(10, 8)).y.sum().backward())


@pytest.mark.parametrize("kind", UNUSABLE)
def test_one_rank_without_the_device_or_dtype(ranks: Ranks, kind: str) -> None:
    for message, afterwards in ranks(2).run(with_unusable, kind):
        assert UNUSABLE[kind][1] in message
        assert afterwards == "no error"


def eval_without_no_grad(rank: int) -> str:
    layer = MoE(MoEConfig(**SIZES), EPGroup(), seed=0).eval()  # type: ignore[arg-type]
    with torch.set_grad_enabled(rank == 0):
        return message_of(lambda: layer(torch.randn(10, 8)))


def test_evaluation_may_have_gradients_on_one_rank(ranks: Ranks) -> None:
    assert ranks(2).run(eval_without_no_grad) == ["no error"] * 2


def mixed_modes(rank: int) -> str:
    layer = MoE(MoEConfig(**SIZES), EPGroup(), seed=0)  # type: ignore[arg-type]
    layer.train(rank == 0)
    return message_of(lambda: layer(torch.randn(10, 8)))


def test_training_and_eval_must_not_mix(ranks: Ranks) -> None:
    for message in ranks(2).run(mixed_modes):
        assert "rank 0: torch.float32 training, rank 1: torch.float32 eval" in message


def after_many_layers(rank: int) -> list[int]:
    numbers = []
    for count in (0, 2**14 - 3, 2**14 - 2, 2**20):
        layer_module._NUM_BUILT[EPGroup().name] = count
        layer = MoE(MoEConfig(**SIZES), EPGroup(), seed=0)  # type: ignore[arg-type]
        layer(torch.randn(10, 8)).y.sum().backward()
        numbers.append(layer._number)
    return numbers


def test_layer_numbers_begin_again(ranks: Ranks) -> None:
    """Before a status word would be negative."""
    assert ranks(2).run(after_many_layers) == [[1, 2**14 - 2, 2**14 - 1, 2**20 % (2**14 - 1) + 1]] * 2


def crossed(rank: int) -> tuple[str, str]:
    """The message of two layers in another order on rank 1; then the same order must work."""
    layers = [MoE(MoEConfig(**SIZES), EPGroup(), seed=0) for _ in range(2)]  # type: ignore[arg-type]
    x = torch.randn(10, 8)
    crossing = message_of(lambda: [layer(x) for layer in (reversed(layers) if rank == 1 else layers)])
    return crossing, message_of(lambda: sum(layer(x).y.sum() for layer in layers).backward())  # type: ignore[union-attr]


def test_layers_in_another_order_on_one_rank(ranks: Ranks) -> None:
    for message, afterwards in ranks(2).run(crossed):
        assert "in different MoE layers, counted as they were built (rank 0: number" in message
        assert "call the layers in the same order on every rank" in message
        assert afterwards == "no error"


def diverged(rank: int) -> str:
    layer = MoE(MoEConfig(**SIZES, router=RouterConfig(check_logits=True)), EPGroup(), seed=0)  # type: ignore[arg-type]
    x = torch.randn(10, 8)
    if rank == 1:
        x[3] = float("nan")
    return message_of(lambda: layer(x))


def test_nan_logits_raise_everywhere_on_request(ranks: Ranks) -> None:
    for message in ranks(2).run(diverged):
        assert "router logits hold NaN or inf (rank 1: 8)" in message
        assert "check_logits=False" in message


def test_nan_input_without_the_check_stays_in_its_rows() -> None:
    layer = MoE(MoEConfig(**SIZES, rounding=RoundingConfig(mode="off")), seed=0)  # type: ignore[arg-type]
    x = torch.randn(10, 8)
    x[3] = float("nan")
    y = layer(x).y
    assert y[3].isnan().all()
    assert y[[0, 1, 2, 4, 5, 6, 7, 8, 9]].isfinite().all()


def test_sequence_balance_needs_sequences() -> None:
    router = RouterConfig(balance="sequence", balance_coef=0.1)
    layer = MoE(MoEConfig(**SIZES, router=router), seed=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"wanted \(B, L, d\), because router.balance='sequence'"):
        layer(torch.randn(10, 8))


def test_a_layer_without_memory_says_so() -> None:
    layer = MoE(MoEConfig(**SIZES), seed=0, device="meta")  # type: ignore[arg-type]
    assert "nothing is computed; use layer.to_empty" in message_of(lambda: layer(torch.ones(10, 8, device="meta")))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # by torch's jvp
@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_torch_func_is_refused(transform: str) -> None:
    layer, x = MoE(MoEConfig(**SIZES), seed=0), torch.randn(3, 10, 8)  # type: ignore[arg-type]
    run: dict[str, Callable[[], object]] = {
        "grad": lambda: torch.func.grad(lambda x: layer(x).y.sum())(x[0]),
        "vmap": lambda: torch.func.vmap(lambda x: layer(x).y)(x),
        "jvp": lambda: torch.func.jvp(lambda x: layer(x).y, (x[0],), (x[0],)),
    }
    with pytest.raises(RuntimeError, match="does not run under transforms of torch.func"):
        run[transform]()


def transformed(rank: int, transform: str) -> tuple[str, str]:
    """The message where rank 1 is under a transform; then a step must work."""
    layer, x = MoE(MoEConfig(**SIZES), EPGroup(), seed=0), torch.randn(3, 10, 8)  # type: ignore[arg-type]
    run: dict[str, Callable[[], object]] = {
        "none": lambda: layer(x),
        "grad": lambda: torch.func.grad(lambda x: layer(x).y.sum())(x),
        "vmap": lambda: torch.func.vmap(lambda x: layer(x).y)(x),
    }
    return message_of(run[transform if rank == 1 else "none"]), message_of(lambda: layer(x).y.sum().backward())


@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_a_transform_on_one_rank_raises_on_all(ranks: Ranks, transform: str) -> None:
    for message, afterwards in ranks(2).run(transformed, transform):
        assert message.startswith("rank 1: an MoE layer does not run under transforms of torch.func")
        assert afterwards == "no error"


def test_functional_call_takes_other_weights_and_checks_them() -> None:
    layer, other = (MoE(MoEConfig(**SIZES), seed=seed) for seed in (0, 1))  # type: ignore[arg-type]
    x, weights = torch.randn(10, 8), dict(other.named_parameters())
    assert torch.equal(torch.func.functional_call(layer, weights, (x,)).y, other(x).y)
    narrow = {**weights, "experts.w1": torch.zeros(8, 8, 7)}
    message = message_of(lambda: torch.func.functional_call(layer, narrow, (x,)))
    assert message == "w1 has shape (8, 8, 7), wanted (8, 8, 8)"
    nowhere = {name: weight.to("meta") for name, weight in weights.items()}
    message = message_of(lambda: torch.func.functional_call(layer, nowhere, (x,)))
    assert message == "x is on cpu, the layer's weights on meta; move one of them"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"E": 16}, "experts holds experts 0..7 of 8, this rank has experts 0..15 of 16"),
        ({"bias": True}, 'Missing key(s) in state_dict: "experts.b1", "experts.b2"'),
    ],
)
def test_the_state_of_another_layer(other: dict[str, object], message: str) -> None:
    """With other experts, or with a weight less."""
    layer, wanted = MoE(MoEConfig(**SIZES), seed=0), MoE(MoEConfig(**{**SIZES, **other}), seed=0)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError) as raised:
        wanted.load_state_dict(layer.state_dict())
    assert message in str(raised.value)
    assert len(str(raised.value).splitlines()) <= 5


def test_a_process_group_needs_torch_distributed() -> None:
    with pytest.raises(RuntimeError, match="EPGroup.alone"):
        EPGroup()
