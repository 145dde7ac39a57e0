"""Every MoE family of transformers: a tiny model of it computes what stock computes, or the reason why it does not is
that of docs/transformers.md."""

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.helpers.tolerances import assert_near
from tests.helpers.transformers_families import FAMILIES, asks_registry, outputs_and_gradients, tiny_model

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "transformers.md"
NO_REGISTRY = "no effect: the experts do not ask the registry"


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    from sonic_ep.integrations.transformers import register

    register()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # models of transformers use what torch has renewed
        yield


def documented() -> dict[str, str]:
    """What docs/transformers.md says of each family."""
    rows = re.findall(r"^\| (.+?) \| ((?:`\w+`(?:, )?)+) \|$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    return {family: result for result, families in rows for family in re.findall(r"`(\w+)`", families)}


def problem_of(check: Any, model: Any) -> str | None:
    try:
        check(model)
    except ValueError as error:
        return str(error)
    return None


def result_of(family: str) -> str:
    """Runs the family's tiny model. Returns the first column of the guide's table."""
    from sonic_ep.integrations.transformers import check
    from sonic_ep.integrations.transformers.experts import uses_registry
    from sonic_ep.integrations.transformers.weights import copied

    if not asks_registry(family):
        return NO_REGISTRY
    model: Any = tiny_model(family, uses_registry).double()  # Qwen3.5's linear attention amplifies rounding errors
    experts: Any = next(filter(uses_registry, model.modules()))
    model.set_experts_implementation("sonic_ep")
    if (problem := problem_of(check, model)) is not None:
        assert type(experts).__name__ in problem
        return f"refused: {'norm of each output' if 'has_post_expert_norm' in problem else 'activation'}"
    ours, our_grads = outputs_and_gradients(model)
    model.set_experts_implementation("eager")
    stock, stock_grads = outputs_and_gradients(model)
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-5)
    assert our_grads.keys() == stock_grads.keys()
    for name, grad in stock_grads.items():
        # A gradient that is 0 but for rounding in float64 is far below 1e-9.
        scale = max(1e-9, float(grad.abs().max()))
        assert_near(our_grads[name], grad, share=1e-5, scale=scale, msg=lambda text, name=name: name + text)
    trained = [name for name in our_grads if name.endswith("down_proj") and ".experts." in name]
    assert trained
    assert all(our_grads[name].abs().max() > 0 for name in trained)
    return f"runs, copied in each forward: {copied(experts)}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_does_what_the_guide_says(family: str) -> None:
    assert result_of(family) == documented().get(family)
