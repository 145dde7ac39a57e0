"""Poisoned memory leaves torch.compile as it was, in a process that goes on with other tests."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.helpers.launch import RankPool
from tests.helpers.poison import poisoned_empty


def compiled(fn: Any) -> Any:
    return torch.compile(fn, backend="eager", fullgraph=True)


def makes_tables_among_stand_ins(rank: int) -> list[float]:
    from torch._dynamo import trace_rules

    with poisoned_empty():
        trace_rules.clear_lru_cache()  # as every init_process_group does
        compiled(lambda x: x + 1)(torch.ones(2))

    def allocates(x: Tensor) -> Tensor:
        return x + torch.empty(2).fill_(rank) + torch.empty_like(x).fill_(1) + x.new_empty(2).fill_(1)

    return compiled(allocates)(torch.zeros(2)).tolist()


def test_what_was_replaced_can_be_compiled_afterwards(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(makes_tables_among_stand_ins) == [[2.0, 2.0], [3.0, 3.0]]
