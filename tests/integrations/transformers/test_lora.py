"""`fuse_lora`: LoRA on experts through PEFT equals PEFT's own on eager experts, and its checkpoints go both ways."""

import copy
import importlib
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("peft")
from sonic_ep import RoundingConfig
from sonic_ep.integrations.transformers import check, fuse_lora, lora, round_tokens
from tests.helpers.hugging_face import batches, loss_of, model_of
from tests.helpers.transformers_families import outputs_and_gradients, tiny_model, token_ids

peft: Any = importlib.import_module("peft")
pytestmark = pytest.mark.usefixtures("registered", "quiet_peft")
EXPERTS = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]


@pytest.fixture
def quiet_peft() -> Iterator[None]:
    """PEFT warns of a missing tokenizer, of vocabularies and of parameters that it does not find in every layer."""
    lora._warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def adapted(name: str, *, model: Any = None, fused: bool = True, **options: Any) -> Any:
    """A model with random adapters; fused unless its experts are eager."""
    model = model_of("qwen3_moe") if model is None else model
    model.set_experts_implementation(name)
    torch.manual_seed(1)
    options = {"r": 4, "target_modules": ["q_proj"], "target_parameters": EXPERTS, **options}
    model = peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, **options))
    if fused and name == "sonic_ep":
        fuse_lora(model)
    return model


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The weights to which PEFT has added B A since."""
    names: list[str] = []
    register_parametrization = torch.nn.utils.parametrize.register_parametrization

    def noted(module: Any, name: str, *args: Any, **options: Any) -> Any:
        names.append(name)
        return register_parametrization(module, name, *args, **options)

    monkeypatch.setattr(torch.nn.utils.parametrize, "register_parametrization", noted)
    return names


def assert_equal(ours: Any, stock: Any) -> None:
    (out, grads), (wanted, wanted_grads) = outputs_and_gradients(ours), outputs_and_gradients(stock)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grads, wanted_grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("targets", [EXPERTS, EXPERTS[:1], EXPERTS[1:]], ids=["both", "up", "down"])
@pytest.mark.parametrize("use_rslora", [False, True])
def test_equals_peft_on_eager_experts(targets: list[str], use_rslora: bool, made: list[str]) -> None:
    options = {"target_parameters": targets, "use_rslora": use_rslora, "lora_alpha": 3}
    ours = adapted("sonic_ep", **options)
    outputs_and_gradients(ours)
    assert made == []
    assert_equal(ours, adapted("eager", **options))
    assert len(made) == 2 * len(targets)
    assert {name for name, each in ours.named_parameters() if each.grad is not None} == {
        name for name, each in ours.named_parameters() if "lora_" in name
    }


def test_without_fuse_lora_peft_adds_to_the_weights(made: list[str]) -> None:
    ours, stock = adapted("sonic_ep", fused=False), adapted("eager")
    assert_equal(ours, stock)
    assert len(made) == 8


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "nemotron_h", "deepseek_v3", "granitemoe", "olmoe"])
def test_families_of_other_layouts(family: str, made: list[str]) -> None:
    """Transposed weights with biases, no gate, and other names of blocks."""
    from sonic_ep.integrations.transformers.experts import uses_registry

    def model() -> Any:
        return tiny_model(family, uses_registry)

    names = [name for name, _ in model().named_parameters() if name.endswith(("up_proj", "experts.down_proj"))]
    options = {"target_parameters": [name for name in names if "experts." in name and "shared" not in name]}
    options["target_modules"] = ["lm_head"]
    ours = adapted("sonic_ep", model=model(), **options)
    check(ours)
    outputs_and_gradients(ours)
    assert made == []
    assert_equal(ours, adapted("eager", model=model(), **options))


def test_ranks_of_their_own_and_several_adapters(made: list[str]) -> None:
    options = {"rank_pattern": {"down_proj": 7}, "alpha_pattern": {"down_proj": 5}}
    ours, stock = adapted("sonic_ep", **options), adapted("eager", **options)
    for model in (ours, stock):
        torch.manual_seed(2)
        config = peft.LoraConfig(r=3, lora_alpha=9, target_parameters=EXPERTS, init_lora_weights=False)
        model.add_adapter("other", config)
    for active in ("default", "other", ["default", "other"]):
        for model in (ours, stock):
            model.base_model.set_adapter(active)
        made.clear()
        outputs_and_gradients(ours)
        assert made == []
        assert_equal(ours, stock)


def test_disabled_and_merged_adapters() -> None:
    ours, stock = adapted("sonic_ep").eval(), adapted("eager").eval()
    ids = batches(0, 1)[0]

    def logits(model: Any) -> Tensor:
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False).logits

    with ours.disable_adapter(), stock.disable_adapter():
        torch.testing.assert_close(logits(ours), logits(stock), rtol=1e-5, atol=1e-5)
    wanted = logits(stock)
    for change in ("merge_adapter", "unmerge_adapter"):
        getattr(ours, change)()
        torch.testing.assert_close(logits(ours), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(ours.merge_and_unload()), wanted, rtol=1e-4, atol=1e-4)


ROUNDING = RoundingConfig(t=8, G=16)


@pytest.mark.parametrize("targets", [EXPERTS, [*EXPERTS, "mlp.gate.weight"]], ids=["experts", "router"])
def test_rounding_before_and_after_adapters(targets: list[str]) -> None:
    plain = adapted("sonic_ep", target_parameters=targets).train()
    results = []
    for turn in range(3):
        model: Any = model_of("qwen3_moe")
        if turn == 0:
            round_tokens(model, ROUNDING)
        model = adapted("sonic_ep", model=model, target_parameters=targets, fused=False).train()
        if turn == 1:
            round_tokens(model, ROUNDING)
        fuse_lora(model)
        if turn == 2:
            round_tokens(model, ROUNDING)
        results.append(outputs_and_gradients(model))
        torch.testing.assert_close(results[-1], results[0])
        merged = model.merge_and_unload()(input_ids=token_ids(), use_cache=False)[0]
        torch.testing.assert_close(merged, results[0][0], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(results[0][0], outputs_and_gradients(plain)[0], 1e-2, 1e-2)


@pytest.mark.parametrize("copied", ["gate", "experts"])
def test_rounding_of_a_router_or_experts_that_peft_copies(copied: str) -> None:
    options: Any = {"target_parameters": None, "modules_to_save": [copied], "fused": False}
    models = [adapted("sonic_ep", **options).train() for _ in range(2)]
    round_tokens(models[0], ROUNDING)
    models[1] = model_of("qwen3_moe")
    round_tokens(models[1], ROUNDING)
    models[1] = adapted("sonic_ep", model=models[1], **options).train()
    with pytest.raises(ValueError, match="round_tokens again if either is a copy"):
        outputs_and_gradients(models[1])
    round_tokens(models[1], ROUNDING)
    torch.testing.assert_close(*map(outputs_and_gradients, models))


def test_rounding_refuses_an_adapted_router_with_groups() -> None:
    model: Any = adapted("sonic_ep", model=model_of("deepseek_v3"), target_parameters=["mlp.gate.weight"], fused=False)
    with pytest.raises(ValueError, match="some of 4 groups"):
        round_tokens(model, ROUNDING)


def test_gradient_checkpointing_deepcopy_and_autocast(made: list[str]) -> None:
    ours, stock = copy.deepcopy(adapted("sonic_ep")), adapted("eager")
    assert_equal(ours, stock)
    made.clear()
    ours.train()
    for use_reentrant in (False, True):
        ours.enable_input_require_grads()
        ours.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(ours, batches(0, 1)[0])
        loss.backward()
        assert float(loss) == pytest.approx(float(loss_of(stock, batches(0, 1)[0])), rel=0.02)
        assert made == ["down_proj", "gate_up_proj"] * 2  # stock's own
        made.clear()


def test_under_compile_the_graph_breaks_at_adapted_experts(made: list[str]) -> None:
    block = adapted("sonic_ep").base_model.model.model.layers[0].mlp
    x = torch.randn(1, 10, 32)
    wanted = block(x)
    adapters = [each for each in block.parameters() if each.requires_grad]
    compiled = torch.compile(block, backend="aot_eager")
    torch.testing.assert_close(compiled(x), wanted)
    grads = [torch.autograd.grad(run(x).square().sum(), adapters) for run in (compiled, block)]
    torch.testing.assert_close(grads[0], grads[1])
    assert made == []


def test_biases_are_adapted_as_before_and_it_is_said_once(caplog: pytest.LogCaptureFixture, made: list[str]) -> None:
    from sonic_ep.integrations.transformers.experts import uses_registry

    def model(name: str) -> Any:
        own = tiny_model("gpt_oss", uses_registry)
        return adapted(name, model=own, target_parameters=[*EXPERTS, "mlp.experts.down_proj_bias"])

    ours = model("sonic_ep")
    with caplog.at_level(logging.WARNING):
        assert_equal(ours, model("eager"))
        outputs_and_gradients(ours)
    assert "down_proj_bias" in made
    (message,) = [record.getMessage() for record in caplog.records if record.name.startswith("sonic_ep")]
    assert message.startswith("GptOssExperts: PEFT makes W + B A in each forward: down_proj_bias is adapted")


def test_experts_that_are_switched_to_stock(caplog: pytest.LogCaptureFixture) -> None:
    ours = adapted("sonic_ep")
    ours.base_model.model.set_experts_implementation("eager")
    assert_equal(ours, adapted("eager"))
    assert any("not computed by sonic_ep" in message for message in caplog.messages)


def test_no_adapters_on_experts() -> None:
    with pytest.raises(ValueError, match=r"Qwen3MoeForCausalLM has no LoRA on experts .* target_parameters="):
        fuse_lora(model_of("qwen3_moe"))
    with pytest.raises(ValueError, match="has no LoRA on experts"):
        adapted("sonic_ep", target_parameters=None)


PLAIN = """
import sys, warnings
import torch, transformers, peft
warnings.simplefilter("ignore")
base, adapter, ids, out, saves = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(base, experts_implementation="eager")
if saves == "saves":
    torch.manual_seed(1)
    names = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=names, init_lora_weights=False)
    model = peft.get_peft_model(model, config)
    model.save_pretrained(adapter)
else:
    model = peft.PeftModel.from_pretrained(model, adapter)
with torch.no_grad():
    logits = model.eval()(input_ids=torch.load(ids), use_cache=False).logits
assert "sonic_ep" not in sys.modules
torch.save(logits, out)
"""


@pytest.mark.parametrize("saver", ["ours", "plain PEFT"])
def test_checkpoints_both_ways(saver: str, tmp_path: Path) -> None:
    """Trained and saved by one, loaded by the other: the same tensors, bit for bit, and the same logits."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    base, adapter, ids, out = (tmp_path / name for name in ("base", "adapter", "ids.pt", "logits.pt"))
    model_of("qwen3_moe").save_pretrained(base)  # type: ignore[operator]
    torch.save(batches(0, 1)[0], ids)
    ours: Any = AutoModelForCausalLM.from_pretrained(base, experts_implementation="sonic_ep")
    if saver == "ours":
        ours = adapted("sonic_ep", model=ours)
        optimizer = torch.optim.AdamW([each for each in ours.parameters() if each.requires_grad], lr=1e-2)
        loss_of(ours, batches(0, 1)[0]).backward()
        optimizer.step()
        ours.save_pretrained(adapter)
    saves = "saves" if saver != "ours" else "loads"
    command = [sys.executable, "-c", PLAIN, *map(str, (base, adapter, ids, out)), saves]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    if saver != "ours":
        ours = peft.PeftModel.from_pretrained(ours, adapter)
        fuse_lora(ours)
    with torch.no_grad():
        logits = ours.eval()(input_ids=torch.load(ids), use_cache=False).logits
    torch.testing.assert_close(logits, torch.load(out), rtol=1e-5, atol=1e-5)
    on_disk = load_file(adapter / "adapter_model.safetensors")
    state = peft.get_peft_model_state_dict(ours)
    assert on_disk.keys() == state.keys()
    assert all(torch.equal(on_disk[name], value) for name, value in state.items())
