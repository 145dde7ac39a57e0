"""`replay_routing` and `skip_padding`: what a batch gives reaches every layer, also when it is computed again."""

import copy
import functools
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from sonic_ep import RoundingConfig, record_routing
from tests.helpers.errors import message_of
from tests.helpers.hugging_face import EXPERTS, LENGTH, TOP_K, batches, model_of, quiet
from tests.helpers.launch import RankPool
from tests.helpers.transformers_families import FAMILIES, asks_registry, tiny_model, token_ids

pytestmark = pytest.mark.usefixtures("registered")
Ranks = Callable[[int], RankPool]
# Weights that are no scaled scores, or logits of more experts.
REFUSED = {
    **dict.fromkeys(("diffusion_gemma", "gemma4", "inkling", "phimoe"), "the weights of other experts are not known"),
    "zaya": "no tensor with the logits of 24 tokens and 8 experts",
    "ernie4_5_vl_moe": "reached 2 of 4 layers with experts",  # the others are for images
}


def a_model(family: str = "qwen3_moe", **changes: Any) -> Any:
    model: Any = model_of(family, **changes)
    model.set_experts_implementation("sonic_ep")
    return model.train()


def drifted(ids: Tensor, layers: int = 2, E: int = EXPERTS, K: int = TOP_K) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    flat = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(ids.numel() * layers)])
    return flat.view(*ids.shape, layers, K)


def step(model: Any, ids: Tensor, **fields: Any) -> list[Tensor]:
    """The loss and all gradients."""
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False, **fields).loss
    loss.backward()
    return [loss.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


def recorded(model: Any, ids: Tensor, **fields: Any) -> Tensor:
    from sonic_ep.integrations.transformers import recorded_experts

    with record_routing() as record:
        step(model, ids, **fields)
    return recorded_experts(model, record, len(ids))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
def test_recorded_experts_repeat_a_step_bit_for_bit(family: str, checkpointing: bool | None) -> None:
    from sonic_ep.integrations.transformers import replay_routing

    model, ids = a_model(family), torch.cat(batches(0, 2))
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    assert len(replay_routing(model)) == (1 if family == "deepseek_v3" else 2)
    wanted = step(model, ids)
    routed_experts = recorded(model, ids)
    assert_same(step(model, ids, routed_experts=routed_experts), wanted)
    for each in model.modules():  # other logits, but the experts hold
        if type(each).__name__.endswith("Router"):
            each.weight.data.neg_()
    assert torch.equal(recorded(model, ids, routed_experts=routed_experts), routed_experts)
    assert not torch.equal(recorded(model, ids), routed_experts)


def oracle_weights(logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
    chosen = logits_TE.double().softmax(1).gather(1, ids_TK)
    return chosen / chosen.sum(1, keepdim=True)


def test_drifted_experts_against_the_models_own_block() -> None:
    """The same block with a router that returns the drifted experts, in float64."""
    from sonic_ep.integrations.transformers import replay_routing

    model, ids = a_model().double(), torch.cat(batches(0, 2))
    routed_experts, stock = drifted(ids), copy.deepcopy(model)
    replay_routing(model)
    ours = step(model, ids, routed_experts=routed_experts)
    stock.set_experts_implementation("eager")
    for index, layer in enumerate(stock.model.layers):
        given_TK = routed_experts[:, :, index].reshape(-1, TOP_K)

        def route(_: nn.Module, __: Any, output: Any, given_TK: Tensor = given_TK) -> Any:
            return output[0], oracle_weights(output[0], given_TK), given_TK

        layer.mlp.gate.register_forward_hook(route)
    wanted = step(stock, ids)
    assert len(ours) == len(wanted)
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6 * float(other.abs().max()))


ONE_BY_ONE = "f0 b0 f1 b1 f2 b2 f3 b3"
INTERLEAVED = "f0 f1 b0 f2 b1 f3 b2 b3"  # 1F1B of the first of two stages


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
def test_interleaved_micro_batches_have_their_own_experts(checkpointing: bool | None) -> None:
    from sonic_ep.integrations.transformers import replay_routing, skip_padding

    model, found = a_model(), []
    replay_routing(model)
    skip_padding(model)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    for schedule in (ONE_BY_ONE, INTERLEAVED):
        losses: dict[str, Tensor] = {}
        model.zero_grad()
        for action, number in schedule.split():
            if action == "b":
                losses[number].backward()
                continue
            ids = batches(int(number), 1)[0]
            mask = torch.ones_like(ids)
            mask[:, : int(number)] = 0
            given = drifted(ids).roll(int(number), 1)
            losses[number] = model(ids, attention_mask=mask, labels=ids, use_cache=False, routed_experts=given).loss
        grads = [each.grad.clone() for each in model.parameters() if each.grad is not None]
        found.append([*(each.detach() for each in losses.values()), *grads])
    assert_same(*found)


@pytest.mark.parametrize("family", [name for name in FAMILIES if asks_registry(name)])
def test_every_family_replays_or_says_why_not(family: str) -> None:
    from sonic_ep.integrations.transformers import check, replay_routing
    from sonic_ep.integrations.transformers.experts import uses_registry

    model: Any = tiny_model(family, uses_registry)
    model.set_experts_implementation("sonic_ep")
    model.float().train()
    try:
        check(model)
    except ValueError:
        pytest.skip("test_families.py: sonic_ep does not compute its experts")
    ids, layers = token_ids(), len(replay_routing(model))
    routed_experts = drifted(ids, layers, 8, K_of(model, ids))
    run = lambda: model(input_ids=ids, use_cache=False, routed_experts=routed_experts)  # noqa: E731
    if family in REFUSED:
        with pytest.raises((ValueError, RuntimeError), match=REFUSED[family]):
            run()
        return
    with record_routing() as record:
        run()
    from sonic_ep.integrations.transformers import recorded_experts

    assert torch.equal(recorded_experts(model, record, len(ids)), routed_experts)


def test_layers_that_hand_nothing_on_are_not_checkpointed() -> None:
    from sonic_ep.integrations.transformers import replay_routing
    from sonic_ep.integrations.transformers.experts import uses_registry

    model: Any = tiny_model("jamba", uses_registry)
    model.set_experts_implementation("sonic_ep")
    model.float().train().gradient_checkpointing_enable()
    ids, layers = token_ids(), len(replay_routing(model))
    with pytest.raises(RuntimeError, match="train this model without gradient checkpointing"):
        model(input_ids=ids, use_cache=False, routed_experts=drifted(ids, layers))


def K_of(model: Any, ids: Tensor) -> int:
    from sonic_ep.integrations.transformers.experts import registered_experts

    experts = [*registered_experts(model, "").values()][0]
    with record_routing() as record:
        model(input_ids=ids, use_cache=False)
    return record.of(experts)[0].shape[-1]


def test_rounding_is_off_for_given_experts(caplog: pytest.LogCaptureFixture) -> None:
    from sonic_ep.integrations.transformers import replay_routing, round_tokens

    model, ids = a_model(), torch.cat(batches(0, 4))
    replay_routing(model)
    routed_experts = recorded(model, ids)
    wanted = step(model, ids)
    round_tokens(model, RoundingConfig(mode="up", t=8, G=16))
    assert not torch.equal(step(model, ids)[0], wanted[0])
    with caplog.at_level(logging.WARNING, "sonic_ep"):
        assert_same(step(model, ids, routed_experts=routed_experts), wanted)
        step(model, ids, routed_experts=routed_experts)
    assert [each.getMessage() for each in caplog.records if "routed_experts" in each.getMessage()] == [
        "rounding.mode='up' has no effect in steps with routed_experts"
    ]


@pytest.mark.parametrize("rounding", [None, RoundingConfig(mode="pad", t=8, G=16)], ids=["plain", "rounded"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_padding_reaches_no_expert(rounding: RoundingConfig | None, checkpointing: bool) -> None:
    """Counts and rows are those of the tokens that the mask has; loss and gradients are the same without."""
    from sonic_ep.integrations import framework_experts as module
    from sonic_ep.integrations.transformers import round_tokens, skip_padding

    model, ids = a_model(), torch.cat(batches(0, 2))
    mask = torch.ones_like(ids)
    mask[1:, : LENGTH // 3] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[1:, LENGTH // 3] = -100  # padding would predict it
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if rounding is not None:
        round_tokens(model, rounding)
    num_rows: list[int] = []
    moe = module.moe

    def noted(x: Tensor, routing: Any, *args: Any, **named: Any) -> Tensor:
        num_rows.append(x.shape[0])
        assert int(routing.counts.tokens_S.sum()) == x.shape[0]
        return moe(x, routing, *args, **named)

    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "moe", noted)
        for skips in (False, True):
            if skips:
                assert len(skip_padding(model)) == 2
            model.zero_grad()
            loss = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
            loss.backward()
            results.append(
                [loss.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]
            )
    calls = 4 if checkpointing else 2
    assert num_rows == [ids.numel()] * calls + [int(mask.sum())] * calls
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


@pytest.mark.filterwarnings("ignore")  # torch's, of graphs that break
@pytest.mark.parametrize("whole", [False, True], ids=["layers", "model"])
def test_a_compiled_model_takes_both(whole: bool) -> None:
    from sonic_ep.integrations.transformers import replay_routing, skip_padding

    (ids,), eager, compiled = batches(0, 1), a_model(), a_model()
    compiled.load_state_dict(eager.state_dict())
    for model in (eager, compiled):
        replay_routing(model)
        skip_padding(model)
    for part in (compiled,) if whole else compiled.model.layers:
        part.compile(backend="aot_eager")
    mask = torch.ones_like(ids)
    mask[:, -3:] = 0
    given = {"attention_mask": mask, "routed_experts": drifted(ids)}
    wanted = [step(eager, ids, **fields) for fields in (given, {}, given)]
    assert not torch.equal(wanted[0][0], wanted[1][0])
    for fields, found in zip((given, {}, given), wanted, strict=True):
        torch.testing.assert_close(step(compiled, ids, **fields), found)


def test_padding_in_generation() -> None:
    from sonic_ep.integrations.transformers import skip_padding

    model, ids = a_model().eval(), torch.cat(batches(0, 1))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    wanted = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    skip_padding(model)
    assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False), wanted)


def test_generation_is_recorded_token_by_token() -> None:
    """The experts of generated tokens are those of a forward over the whole sequences."""
    from sonic_ep.integrations.transformers import recorded_experts

    model, ids = a_model().eval(), torch.cat(batches(0, 1))
    with record_routing() as record:
        whole = model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=-1)
    generated = recorded_experts(model, record, len(ids))
    with record_routing() as record, torch.no_grad():
        model(input_ids=whole[:, :-1], use_cache=False)
    assert generated.shape == (*whole[:, :-1].shape, 2, TOP_K)
    assert torch.equal(generated, recorded_experts(model, record, len(ids)))


def test_errors() -> None:
    from sonic_ep.integrations.transformers import recorded_experts, replay_routing, skip_padding

    with pytest.raises(ValueError, match="there is no routing to replay"):
        replay_routing(nn.Linear(2, 2))
    model, ids = a_model(), torch.cat(batches(0, 1))
    routed_experts = drifted(ids)
    skip_padding(model)
    with pytest.raises(ValueError, match=r"does not take; call replay_routing\(model\)"):
        model(input_ids=ids, routed_experts=routed_experts)
    for shape in ((1, 1, 12, 12), (3, 12), (2, 11)):  # transformers itself would raise for the last two
        with pytest.raises(ValueError, match=rf"is {re.escape(str(shape))}, and skip_padding needs \(B=2, L=12\)"):
            model(input_ids=ids, attention_mask=torch.zeros(shape))
    with pytest.raises(ValueError, match="attention_mask is dict"):
        model(input_ids=ids, attention_mask={"full_attention": torch.ones_like(ids)})
    replay_routing(model)
    replay_routing(model)
    with pytest.raises(ValueError, match=r"routed_experts has shape \(2, 12, 1, 3\), wanted \(2, 12, 2, 3\)"):
        model(input_ids=ids, routed_experts=routed_experts[:, :, :1])
    with pytest.raises(ValueError, match="24 tokens ids out of range; allowed are 0..7"):
        model(input_ids=ids, routed_experts=routed_experts + 8)
    with pytest.raises(ValueError, match="need input_ids or inputs_embeds"):
        model(routed_experts=routed_experts)
    with record_routing() as record, pytest.raises(RuntimeError, match="recorded no routing"):
        recorded_experts(model, record, 2)
    model.set_experts_implementation("eager")
    with pytest.raises(RuntimeError, match="reached 0 of 2 layers with experts: Qwen3MoeForCausalLM"):
        model(input_ids=ids, routed_experts=routed_experts)
    model.set_experts_implementation("sonic_ep")
    assert_same(step(model, ids), step(a_model(), ids))


def test_an_error_of_a_model_that_rounds() -> None:
    from sonic_ep.integrations.transformers import round_tokens, skip_padding

    model, ids = a_model().train(), torch.cat(batches(0, 1))
    skip_padding(model)
    round_tokens(model, RoundingConfig(mode="up", t=8, G=16))
    with pytest.raises(ValueError, match=r"attention_mask is \(3, 12\), and skip_padding needs"):
        model(input_ids=ids, attention_mask=torch.zeros(3, 12))


def test_ids_of_local_experts_are_no_record() -> None:
    """Under transformers' own dispatch a rank's experts see the ids that they have, and others in place of the rest."""
    from sonic_ep.integrations.transformers import replay_routing, round_tokens, skip_padding
    from sonic_ep.integrations.transformers.experts import registered_experts

    model, ids = a_model(), torch.cat(batches(0, 1))
    for experts in registered_experts(model, "").values():
        experts._is_expert_parallel = True  # type: ignore[assignment]
    refused = r" needs .* build the model with DistributedConfig\(ep_implementation='sonic_ep'\)"
    with record_routing(), pytest.raises(ValueError, match="record_routing" + refused):
        model(input_ids=ids)
    for function in (replay_routing, skip_padding, functools.partial(round_tokens, rounding=RoundingConfig())):
        with pytest.raises(ValueError, match=getattr(function, "__name__", "round_tokens") + refused):
            function(model)
    model(input_ids=ids)


def expert_parallel_steps(rank: int, path: Path) -> dict[str, Any]:
    from sonic_ep.integrations.transformers import replay_routing, skip_padding
    from tests.integrations.transformers.test_expert_parallel import Layout, load

    ids, seen = batches(rank, 1)[0], {}
    with quiet():
        model = load(path, Layout(fsdp_size=2, ep_size=2), "sonic_ep").train()
        replay_routing(model)
        routed_experts = recorded(model, ids)
        losses = [float(step(model, ids, **fields)[0]) for fields in ({}, {"routed_experts": routed_experts})]
        seen["replay"] = losses[0] == losses[1]
        seen["message"] = message_of(lambda: step(model, ids, routed_experts=routed_experts + 8 * rank))
        skip_padding(model)
        mask = torch.ones_like(ids)
        mask[:, : 4 * rank] = 0
        loss = model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss
        seen["finite"] = bool(loss.isfinite())
        bad = mask if rank == 0 else mask[:, 1:]
        seen["bad mask"] = message_of(lambda: model(input_ids=ids, attention_mask=bad, use_cache=False))
    return seen


@pytest.mark.parallel_registry
def test_across_ranks(ranks: Ranks, tmp_path: Path) -> None:
    model_of("qwen3_moe").save_pretrained(tmp_path)  # type: ignore[operator]
    for seen in ranks(2).run(expert_parallel_steps, tmp_path):
        assert seen["replay"]
        assert seen["finite"]
        assert "rank 1: routed_experts gives 24 tokens ids out of range" in seen["message"]
        assert "rank 1: attention_mask is (2, 11), and skip_padding needs (B=2, L=12)" in seen["bad mask"]


def recorded_under(rank: int, path: Path, layout: Any, implementation: str) -> str:
    from tests.integrations.transformers.test_expert_parallel import load

    with quiet():
        model = load(path, layout, implementation, "sonic_ep").train()
        with record_routing():
            return message_of(lambda: model(input_ids=batches(0, 1)[0], use_cache=False))


@pytest.mark.parametrize(
    ("tp_size", "implementation", "message"),
    [
        (2, "all_reduce", "record_routing needs a rank's tokens with the experts of all ranks"),
        (1, "all_to_all", "record_routing needs a rank's tokens with the experts of all ranks"),
        (2, "sonic_ep", "record_routing with tp_size=2 would record a slice of the batch on each rank; set tp_size=1"),
    ],
)
@pytest.mark.parallel_registry
def test_records_of_parts_are_refused_on_every_rank(
    tp_size: int, implementation: str, message: str, ranks: Ranks, tmp_path: Path
) -> None:
    from tests.integrations.transformers.test_expert_parallel import Layout

    model_of("qwen3_moe", num_key_value_heads=2).save_pretrained(tmp_path)  # type: ignore[operator]
    layout = Layout(fsdp_size=2 // tp_size, tp_size=tp_size, ep_size=2)
    for said in ranks(2).run(recorded_under, tmp_path, layout, implementation):
        assert message in said
