"""Ten steps of the named families equal stock over ep 1, 2, 4 x fsdp 1, 2 x tp 1, 2, where legal; folders go both ways.

ep must divide fsdp * tp. Stock is `ep_implementation="all_to_all"` with eager experts. Every model starts from a folder
that transformers saved alone, and one that we trained over all ranks is loaded with eager experts in one process.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.launch import run_ranks

pytest.importorskip("transformers")
from sonic_ep.integrations.transformers.experts import uses_registry
from tests.helpers.hugging_face import batches
from tests.helpers.transformers_families import tiny_model
from tests.integrations.transformers.test_expert_parallel import Layout, Trained, assert_alike, load, quiet, train

pytestmark = pytest.mark.parallel_registry

STEPS = 10
# With larger weights rounding errors grow: stock's own experts then differ by more than 1e-5 from each other.
SMALL = {"initializer_range": 0.05}
# By number of ranks. The last one's model is saved.
LAYOUTS = {
    2: [Layout(1, 2, 1), Layout(1, 2, 2), Layout(2, 1, 1), Layout(2, 1, 2)],
    4: [Layout(2, 2, 1), Layout(2, 2, 2), Layout(2, 2, 4)],
}
# Beyond the grid, for one family.
WIDER = {2: [], 4: [Layout(4, 1, 2), Layout(4, 1, 4)]}
# Moonlight and Kimi K2 are of deepseek_v3's classes. Llama-4's experts do not ask the registry.
QUICK = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "nemotron_h")
OTHERS = (
    "deepseek_v2",
    "ernie4_5_moe",
    "glm4_moe",
    "granitemoe",
    "minimax",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_next",
)
CASES = [
    *(pytest.param(family, 2, id=f"{family}-2") for family in QUICK),
    pytest.param("gpt_oss", 4, id="gpt_oss-4"),
    *(pytest.param(family, 2, id=f"{family}-2", marks=pytest.mark.exhaustive) for family in OTHERS),
    *(
        pytest.param(family, 4, id=f"{family}-4", marks=pytest.mark.exhaustive)
        for family in (*QUICK, *OTHERS)
        if family != "gpt_oss"
    ),
]


@pytest.mark.parametrize(("family", "size"), CASES)
def test_ten_steps_equal_stock(family: str, size: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = tiny_model(family, uses_registry, **SMALL)
    model.save_pretrained(tmp_path / "start")
    layouts = [*(WIDER[size] if family == "qwen3_moe" else []), *LAYOUTS[size]]
    # Processes of its own: DTensor's caches may return meshes of an earlier call, of which the groups are gone.
    found = run_ranks(on_grid, size, tmp_path, layouts, timeout=500)
    for layout, results in zip(layouts, zip(*found, strict=True), strict=True):
        assert len(results[0][0].losses) == STEPS, layout
        assert_alike([*results])
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "end", attn_implementation="eager").eval()
    for rank, results in enumerate(found):
        own = batches(rank // layouts[-1].tp_size, STEPS + 1)[STEPS]
        with torch.no_grad():
            logits = again(input_ids=own, use_cache=False).logits
        torch.testing.assert_close(results[-1][0].logits, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", [*QUICK, *OTHERS])
@pytest.mark.usefixtures("registered")
def test_ten_steps_of_one_rank(family: str) -> None:
    found: list[Trained] = []
    for experts in ("sonic_ep", "eager"):
        model: Any = tiny_model(family, uses_registry, **SMALL)
        model.set_experts_implementation(experts)
        torch.manual_seed(0)
        found.append(train(model, 0, STEPS))
    assert_alike([found])


def on_grid(rank: int, path: Path, layouts: list[Layout]) -> list[tuple[Trained, Trained]]:
    def trained(layout: Layout, dispatch: str, experts: str) -> tuple[Any, Trained]:
        torch.manual_seed(0)  # Phi-MoE's router draws
        model = load(path / "start", layout, dispatch, experts)
        return model, train(model, rank // layout.tp_size, STEPS)

    found = []
    with quiet():
        for layout in layouts:
            model, ours = trained(layout, "sonic_ep", "sonic_ep")
            if layout == layouts[-1]:
                model.save_pretrained(path / "end")
            found.append((ours, trained(layout, "all_to_all", "eager")[1]))
    return found
