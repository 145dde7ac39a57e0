"""No bit of a layer's results changes by accident. See digest.py, which renews what is stored."""

import json
from collections.abc import Callable

import pytest

from tests.helpers.launch import RankPool
from tests.results.digest import STORED, differences, fingerprint, results_of
from tests.results.layers import EP_SIZES

Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize("ep_size", EP_SIZES)
def test_results_are_unchanged(ranks: Ranks, ep_size: int) -> None:
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    here = fingerprint(ranks(1))
    if any(stored[key] != value for key, value in here.items()):
        pytest.skip(
            f"the digests are of another torch, or of a CPU that rounds otherwise ({here} here): "
            "python tests/results/digest.py --against COMMIT compares on this one"
        )
    wanted = {layer: tensors for layer, tensors in stored["results"].items() if layer.endswith(f"ep_size={ep_size}")}
    lines = differences(wanted, results_of(ranks(ep_size)))
    assert not lines, "\n".join(lines)


def test_a_difference_names_the_layer_the_tensor_and_the_rank() -> None:
    wanted = {"a": {"y": "1 2 3", "x.grad": "4 5 6"}, "b": {"y": "7"}}
    got = {"a": {"y": "1 0 0", "x.grad": "4 5 6"}, "b": {"z": "7"}}
    assert differences(wanted, got) == ["a: y differs on rank 1, 2", "b: y is missing", "b: z is new"]
    assert differences(wanted, wanted) == []
