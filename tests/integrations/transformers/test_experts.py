"""Our experts in transformers' models: layouts, sentinels, frozen weights, checkpointing, autocast, errors, files."""

import copy
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from tests.helpers.hugging_face import batches, loss_of, model_of
from tests.helpers.transformers_families import outputs_and_gradients, tiny_model

pytestmark = pytest.mark.usefixtures("registered")
E, H, I, T, K = 6, 8, 5, 11, 3  # noqa: E741
Grads = dict[str, Tensor]


def experts_of(
    *, gated: bool = True, concatenated: bool = True, transposed: bool = False, bias: bool = False, **own: Any
) -> Any:
    """A module of experts with the decorator, and an eager forward of transformers' own."""
    from transformers.integrations.moe import batched_mm_experts_forward, use_experts_implementation

    @use_experts_implementation(has_gate=gated, is_concatenated=concatenated, is_transposed=transposed, has_bias=bias)
    class SomeExperts(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts, J, name = E, 2 * I if gated else I, "gate_up_proj" if gated else "up_proj"
            for key, rows, columns in ((name, J, H), ("down_proj", H, I)):
                shape = (E, columns, rows) if transposed else (E, rows, columns)
                self.register_parameter(key, nn.Parameter(torch.randn(shape)))
                if bias:
                    self.register_parameter(f"{key}_bias", nn.Parameter(torch.randn(E, rows)))
            self.act_fn = own.get("act_fn", nn.SiLU())

        def forward(self, *args: Any) -> Tensor:
            return batched_mm_experts_forward(self, *args)

    def alternating(experts: Any, rows: Tensor) -> Tensor:
        return experts.act_fn(rows[..., ::2]) * rows[..., 1::2]

    if not concatenated:
        SomeExperts._apply_gate = alternating  # type: ignore[attr-defined]
    if "apply_gate" in own:
        SomeExperts._apply_gate = own["apply_gate"]  # type: ignore[attr-defined]
    return SomeExperts(SimpleNamespace(_experts_implementation="sonic_ep"))


def a_batch() -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(T, H, requires_grad=True)
    ids = torch.rand(T, E).topk(K).indices
    return x, ids, torch.rand(T, K, requires_grad=True)


def run(experts: Any, name: str, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Grads]:
    """The output, and the gradients of x, weights and parameters."""
    experts.config._experts_implementation = name
    leaves = {"x": x, "weights": weights, **dict(experts.named_parameters())}
    leaves = {key: leaf for key, leaf in leaves.items() if leaf.requires_grad}
    out = experts(x, ids, weights)
    grads = torch.autograd.grad((out * torch.linspace(-1, 1, H)).sum(), list(leaves.values()))
    return out.detach(), dict(zip(leaves, grads, strict=True))


def assert_as_eager(experts: Any, *batch: Tensor) -> None:
    (out, grads), (stock, stock_grads) = run(experts, "sonic_ep", *batch), run(experts, "eager", *batch)
    torch.testing.assert_close(out, stock, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grads, stock_grads, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("concatenated", [False, True])
def test_every_layout_equals_eager(concatenated: bool, transposed: bool, bias: bool) -> None:
    experts = experts_of(concatenated=concatenated, transposed=transposed, bias=bias)
    assert_as_eager(experts, *a_batch())


@pytest.mark.parametrize("act_fn", [nn.SiLU(), nn.GELU("tanh"), nn.GELU(), nn.ReLU()])
def test_activations_with_a_gate(act_fn: nn.Module) -> None:
    assert_as_eager(experts_of(act_fn=act_fn), *a_batch())


@pytest.mark.parametrize("act_fn", [nn.SiLU(), nn.GELU("tanh"), nn.GELU(), nn.ReLU()])
@pytest.mark.parametrize("transposed", [False, True])
def test_without_a_gate(transposed: bool, act_fn: nn.Module) -> None:
    assert_as_eager(experts_of(gated=False, transposed=transposed, act_fn=act_fn), *a_batch())


def test_ids_of_other_ranks_are_skipped(poison: None) -> None:
    experts = experts_of()
    experts._is_expert_parallel = True
    x, ids, weights = a_batch()
    other = torch.rand(T, K) < 0.5
    ids = ids.masked_fill(other, E)
    masked = weights.detach().masked_fill(other, 0).requires_grad_()
    assert_as_eager(experts, x, ids, masked)
    assert_as_eager(experts, x, torch.full_like(ids, E), torch.zeros(T, K, requires_grad=True))


def test_no_tokens() -> None:
    experts = experts_of()
    x, ids, weights = torch.empty(0, H, requires_grad=True), torch.empty(0, K, dtype=torch.long), torch.empty(0, K)
    out, grads = run(experts, "sonic_ep", x, ids, weights.requires_grad_())
    assert out.shape == (0, H)
    assert not any(grad.any() for grad in grads.values())


@pytest.mark.parametrize("frozen", ["gate_up_proj", "down_proj", "both"])
def test_frozen_weights(frozen: str) -> None:
    experts = experts_of(concatenated=False)
    for name, weight in experts.named_parameters():
        weight.requires_grad_(frozen not in (name, "both"))
    assert_as_eager(experts, *a_batch())


def test_autocast_computes_in_its_dtype_and_returns_that_of_the_input() -> None:
    experts, batch = experts_of(), a_batch()
    with torch.autocast("cpu", torch.bfloat16):
        out, grads = run(experts, "sonic_ep", *batch)
    assert out.dtype == torch.float32
    assert {grad.dtype for grad in grads.values()} == {torch.float32}
    stock, stock_grads = run(experts, "eager", *batch)
    torch.testing.assert_close(out, stock, rtol=0.05, atol=0.05 * float(stock.abs().max()))
    for name, grad in stock_grads.items():
        torch.testing.assert_close(grads[name], grad, rtol=0.05, atol=0.05 * float(grad.abs().max()))


def test_input_of_another_dtype_than_the_weights() -> None:
    experts = experts_of().to(torch.bfloat16)
    x, ids, weights = a_batch()
    out = experts(x, ids, weights)
    assert out.dtype == torch.float32


def test_gradient_checkpointing_equals_none() -> None:
    model: Any = model_of("qwen3_moe")
    model.set_experts_implementation("sonic_ep")
    model.train()
    _, plain = outputs_and_gradients(model)
    model.gradient_checkpointing_enable()
    _, replayed = outputs_and_gradients(model)
    torch.testing.assert_close(replayed, plain, rtol=0, atol=0)


def step(model: Any, optimizer: torch.optim.Optimizer, ids: Tensor) -> float:
    loss = loss_of(model, ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach().item()


def test_ten_steps_equal_eager() -> None:
    def losses(name: str) -> list[float]:
        model: Any = model_of("mixtral", output_router_logits=True)
        model.set_experts_implementation(name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-3)
        return [step(model, optimizer, ids) for ids in batches(0, 10)]

    ours = losses("sonic_ep")
    assert ours == pytest.approx(losses("eager"), abs=1e-5)
    assert ours[-1] < ours[0]


def test_thirty_steps_equal_eager_if_tokens_go_to_the_same_experts() -> None:
    """In step 15 of these two experts nearly tie, and which one is third differs between stock's own, too: LOG.md."""
    from sonic_ep.integrations.transformers.experts import uses_registry

    selections: list[Tensor] = []

    def losses(name: str) -> list[float]:
        model: Any = tiny_model("hunyuan_v1_moe", uses_registry)
        model.set_experts_implementation(name)
        stored = iter(selections)

        def select(router: Any, _: Any, outputs: tuple[Tensor, ...]) -> Any:
            logits, weights, ids = outputs
            if name == "eager":
                selections.append(ids)
                return outputs
            ids = next(stored)
            weights = logits.softmax(1).gather(1, ids)
            return logits, weights / weights.sum(1, keepdim=True), ids

        for block in model.modules():
            if hasattr(block, "experts"):
                block.gate.register_forward_hook(select)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        return [step(model, optimizer, ids) for ids in batches(0, 30, 8)]

    stock, ours = losses("eager"), losses("sonic_ep")
    assert ours == pytest.approx(stock, abs=2e-6)
    assert len(selections) == 60


def test_a_compiled_block_is_one_graph_once_the_model_is_checked() -> None:
    from sonic_ep.integrations.transformers import check

    model: Any = model_of("qwen3_moe")
    model.set_experts_implementation("sonic_ep")
    check(model)
    block = model.model.layers[0].mlp
    x = torch.randn(1, 12, 32)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), block(x))
    parameters = [each for each in block.parameters() if each.requires_grad]
    grads = [torch.autograd.grad(run(x).square().sum(), parameters) for run in (compiled, block)]
    torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.filterwarnings("ignore")  # torch's, of graphs that break
@pytest.mark.parametrize("checked", [True, False])
def test_a_compiled_block_rounds_as_an_eager_one(checked: bool) -> None:
    from sonic_ep import RoundingConfig
    from sonic_ep.integrations.transformers import check, round_tokens

    model: Any = model_of("qwen3_moe")
    model.set_experts_implementation("sonic_ep")
    if checked:
        check(model)
    block = model.model.layers[0].mlp.train()
    compiled, x = torch.compile(block, backend="aot_eager"), torch.randn(1, 64, 32)
    plain = block(x)
    round_tokens(model, RoundingConfig(G=8, t=4))
    parameters = [each for each in block.parameters() if each.requires_grad]
    for _ in range(2):
        outs = [run(x) for run in (compiled, block)]
        assert not torch.equal(outs[1], plain)
        torch.testing.assert_close(outs[0], outs[1])
        grads = [torch.autograd.grad(out.square().sum(), parameters) for out in outs]
        torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.filterwarnings("ignore")  # torch's, of graphs that break
def test_a_copy_of_compiled_experts_computes_itself() -> None:
    from sonic_ep.integrations.transformers import check

    model: Any = model_of("qwen3_moe")
    model.set_experts_implementation("sonic_ep")
    check(model)
    copied, x = copy.deepcopy(model.model.layers[0].mlp), torch.randn(1, 12, 32)
    with torch.no_grad():
        copied.experts.down_proj.mul_(2)
    for block in (model.model.layers[0].mlp, copied):
        compiled = torch.compile(block, backend="aot_eager")
        for _ in range(2):  # the copy makes its key in the first call
            torch.testing.assert_close(compiled(x), block(x))


def test_generate_chooses_the_same_tokens() -> None:
    model: Any = model_of("qwen3_moe")
    model.eval()
    prompt, found = batches(0, 1)[0], []
    for name in ("sonic_ep", "eager"):
        model.set_experts_implementation(name)
        found.append(model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0))
    torch.testing.assert_close(found[0], found[1])


def test_files_are_those_of_stock(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    saved: Any = model_of("qwen3_moe")
    saved.set_experts_implementation("sonic_ep")
    saved.save_pretrained(tmp_path)
    assert "sonic_ep" not in (tmp_path / "config.json").read_text(encoding="utf-8")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="sonic_ep")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager")
    torch.testing.assert_close(ours.state_dict(), dict(saved.state_dict()), rtol=0, atol=0)
    torch.testing.assert_close(outputs_and_gradients(ours)[0], outputs_and_gradients(stock)[0], rtol=1e-5, atol=1e-5)


def test_a_copied_module_computes_with_its_own_weights() -> None:
    experts = experts_of()
    batch = a_batch()
    run(experts, "sonic_ep", *batch)
    other = copy.deepcopy(experts)
    with torch.no_grad():
        other.down_proj.mul_(2)
    torch.testing.assert_close(run(other, "sonic_ep", *batch)[0], 2 * run(experts, "sonic_ep", *batch)[0])


def test_a_copy_of_weights_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    from sonic_ep.integrations.transformers import weights

    weights._log_once.cache_clear()
    with caplog.at_level(logging.INFO, "sonic_ep.integrations.transformers"):
        for _ in range(2):
            experts_of(transposed=True)(*a_batch())
    assert [record.getMessage() for record in caplog.records] == [
        "SomeExperts: each forward copies its weights to the layout that the kernels read"
    ]


def a_clamp(experts: Any, rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, -1)
    return nn.functional.silu(gate.clamp(max=experts.limit)) * up.clamp(-experts.limit, experts.limit)


def test_a_clamp_at_10() -> None:
    experts = experts_of(apply_gate=a_clamp)
    experts.limit = 10.0
    with torch.no_grad():
        experts.gate_up_proj.mul_(5)  # pre-activations beyond the limit
    x, ids, weights = a_batch()
    assert (x @ experts.gate_up_proj.mT).abs().max() > 10
    assert_as_eager(experts, x, ids, weights)


def test_an_activation_that_we_lack() -> None:
    experts = experts_of(apply_gate=a_clamp)
    experts.limit = 8.0
    with pytest.raises(ValueError, match=r"act_fn=SiLU, limit=8\.0\) that sonic_ep does not have.*'grouped_mm'"):
        experts(*a_batch())
    with pytest.raises(ValueError, match="act_fn=Tanh"):
        experts_of(act_fn=nn.Tanh())(*a_batch())


def test_other_experts_that_we_do_not_compute() -> None:
    experts = experts_of()
    experts.has_post_expert_norm = True
    with pytest.raises(ValueError, match="has_post_expert_norm=True"):
        experts(*a_batch())
    experts = experts_of()
    experts.down_proj = nn.Parameter(experts.down_proj.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ValueError, match=r"weights of torch\.float8_e4m3fn"):
        experts(*a_batch())


def test_check_names_the_modules_or_the_reason() -> None:
    from sonic_ep.integrations.transformers import check
    from sonic_ep.integrations.transformers.experts import uses_registry

    model: Any = model_of("qwen3_moe")
    with pytest.raises(ValueError, match="model.layers.0.mlp.experts has experts_implementation='grouped_mm'"):
        check(model)
    model.set_experts_implementation("sonic_ep")
    assert check(model) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    with pytest.raises(ValueError, match="Linear ask transformers' registry.*no effect"):
        check(nn.Linear(1, 1))
    model = tiny_model("deepseek_v4", uses_registry)
    model.set_experts_implementation("sonic_ep")
    next(filter(uses_registry, model.modules())).limit = 8.0  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.experts: DeepseekV4Experts .*limit=8\.0"):
        check(model)


def test_rounding_is_refused() -> None:
    from sonic_ep import RoundingConfig
    from sonic_ep.integrations.transformers import SonicEPOptions, register

    with pytest.raises(ValueError, match="mode='nearest'.*set rounding=None"):
        register(SonicEPOptions(rounding=RoundingConfig(mode="nearest")))
    register(SonicEPOptions(rounding=RoundingConfig(mode="off")))


def test_transports_in_turns_keep_their_programs() -> None:
    from sonic_ep import EPGroup
    from sonic_ep.dispatch.local import LocalTransport
    from sonic_ep.integrations.transformers import SonicEPOptions
    from sonic_ep.integrations.transformers.experts import _experts_of

    module, group, exact, static = nn.Module(), EPGroup.alone(), LocalTransport(), LocalTransport()
    options = SonicEPOptions()
    first, second = (_experts_of(module, group, transport, options, 2) for transport in (exact, static))
    assert first is not second
    assert _experts_of(module, group, exact, options, 2) is first
    assert _experts_of(module, group, static, options, 2) is second
