"""Plain state dicts: ours takes those of each of Megatron's experts, and `to_layout` writes them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.launch import RankPool
from tests.helpers.megatron_experts import VARIANTS, bare_experts, module_of, run_with, weights

pytest.importorskip("megatron.core")

from megatron.core.transformer.moe.experts import TEGroupedMLP

from sonic_ep.integrations.megatron.checkpoint import to_layout

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="of CPU and gloo: runs with CUDA_VISIBLE_DEVICES=")


def differences(run: Any, other: Any) -> list[str]:
    """Names of tensors that are not equal bit by bit."""
    found, wanted = module_of(run).state_dict(), module_of(other).state_dict()
    assert found.keys() == wanted.keys()
    return [name for name, value in found.items() if torch.is_tensor(value) and not torch.equal(value, wanted[name])]


def exchange(rank: int, variant: str) -> list[str]:
    """Whole models through load_state_dict and to_layout, strictly, at EP 2; what came out different."""
    from tests.helpers.megatron_training import parallel_state

    config = VARIANTS[variant]
    order = {"gated": config.get("gated_linear_unit", True)}
    order["interleave_size"] = config.get("moe_mlp_glu_interleave_size")
    faults = []
    with parallel_state(expert=2):
        ours, sequential = run_with("ours", **config), run_with("sequential", **config)
        others = {"sequential": run_with("sequential", seed=1, **config)}
        saved: dict[str, dict[str, Any]] = {}
        for layout, run in others.items():
            written = to_layout(module_of(ours).state_dict(), layout, **order)  # type: ignore[arg-type]
            module_of(run).load_state_dict(written)
            saved[layout] = module_of(run).state_dict()
        saved["te_grouped"] = to_layout(module_of(ours).state_dict(), "te_grouped", **order)
        faults += [f"ours -> sequential: {name}" for name in differences(others["sequential"], sequential)]
        for layout, state in saved.items():
            back = run_with("ours", seed=1, **config)
            module_of(back).load_state_dict(state)
            faults += [f"{layout} -> ours: {name}" for name in differences(back, ours)]
    return faults


def load_turned(rank: int) -> str:
    """What is said of experts whose weights have the right number of elements and another shape."""
    from tests.helpers.megatron_training import parallel_state

    with parallel_state():
        model = module_of(run_with("ours"))
        written = to_layout(model.state_dict(), "sequential")
        turned = {key: value.mT if key.endswith("linear_fc1.weight") else value for key, value in written.items()}
        try:
            model.load_state_dict(turned)
        except RuntimeError as error:
            return str(error)
    return "nothing"


@on_cpu
def test_weights_of_another_shape_are_refused(ranks: Callable[[int], RankPool]) -> None:
    (message,) = ranks(1).run(load_turned)
    assert "size mismatch for decoder.layers.0.mlp.experts.weight1" in message


def load_harmed(rank: int) -> list[str]:
    """What is said of entries that cannot be stacked."""
    from tests.helpers.megatron_training import parallel_state

    said = []
    with parallel_state():
        model = module_of(run_with("ours"))
        for layout in ("sequential", "te_grouped"):
            written = to_layout(model.state_dict(), layout)
            key = next(key for key in written if "linear_fc1.weight" in key)
            for harmed in (None, 3, written[key][:-1], written[key].sum()):
                try:
                    model.load_state_dict({**written, key: harmed})
                except RuntimeError as error:
                    said.append(str(error))
    return said


@on_cpu
def test_entries_that_cannot_be_stacked_are_refused_by_name(ranks: Callable[[int], RankPool]) -> None:
    (said,) = ranks(1).run(load_harmed)
    assert len(said) == 8
    for text in said:
        assert 'Missing key(s) in state_dict: "decoder.layers.0.mlp.experts.weight1"' in text


@on_cpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_models_of_every_layout(ranks: Callable[[int], RankPool], variant: str) -> None:
    assert ranks(2).run(exchange, variant) == [[]] * 2


@pytest.fixture
def stacked() -> dict[str, Tensor]:
    """Two experts, H = 3, I = 2: gate rows are 10e, 10e + 1, up rows 10e + 5, 10e + 6."""
    rows = torch.tensor([[0.0, 5, 1, 6], [10, 15, 11, 16]])
    return {"experts.weight1": rows[..., None].expand(2, 4, 3), "experts.weight2": torch.arange(12.0).view(2, 3, 2)}


def test_to_layout_by_hand(stacked: dict[str, Tensor]) -> None:
    sequential = to_layout(stacked, "sequential")
    assert sequential["experts.local_experts.1.linear_fc1.weight"][:, 0].tolist() == [10, 11, 15, 16]
    assert sequential["experts.local_experts.1.linear_fc2.weight"].tolist() == [[6, 7], [8, 9], [10, 11]]
    te_grouped = to_layout(stacked, "te_grouped")
    assert te_grouped["experts.linear_fc1.weight1"][:, 0].tolist() == [10, 11, 15, 16]
    assert te_grouped["experts.linear_fc2.weight0"].tolist() == [[0, 1], [2, 3], [4, 5]]


def test_to_layout_in_blocks_by_hand() -> None:
    """Gate rows are 0 to 3, up rows 10 to 13."""
    rows = torch.tensor([[0.0, 10, 1, 11, 2, 12, 3, 13]])[..., None].expand(1, 8, 3)
    state = {"experts.weight1": rows, "experts.weight2": torch.zeros(1, 3, 4)}
    te_grouped = to_layout(state, "te_grouped", interleave_size=2)["experts.linear_fc1.weight0"]
    assert te_grouped[:, 0].tolist() == [0, 1, 10, 11, 2, 3, 12, 13]
    assert TEGroupedMLP._remove_glu_interleaving(te_grouped.T, 2)[0].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    sequential = to_layout(state, "sequential", interleave_size=2)["experts.local_experts.0.linear_fc1.weight"]
    assert sequential[:, 0].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]  # which knows no blocks


def test_to_layout_says_what_it_cannot(stacked: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match="layout='megablocks' is neither"):
        to_layout(stacked, "megablocks")  # type: ignore[arg-type]


def drawn(rank: int) -> bool:
    """Whether experts of one seed have the same rows in Megatron's order, with and without blocks."""
    from tests.helpers.megatron_training import gpt_config, parallel_state

    found = []
    for block in (None, 2):
        with parallel_state(seed=3):
            torch.manual_seed(3)
            experts = bare_experts("ours", gpt_config(moe_mlp_glu_interleave_size=block))
            found.append(weights("ours", experts))
    return all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@on_cpu
def test_blocks_are_drawn_as_megatron_draws_them(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(1).run(drawn) == [True]
