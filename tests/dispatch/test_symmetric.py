"""Ranks that write into each other's memory, against the all-to-all: the same bytes for the same plan.

Processes share files here and the kernels are interpreted; tests/dispatch/test_symmetric_gpu.py has GPUs.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sonic_ep.dispatch.all_to_all import AllToAllTransport
from sonic_ep.dispatch.protocol import Receipt, Transport
from sonic_ep.dispatch.symmetric import SymmetricTransport
from sonic_ep.groups import EPGroup
from tests.dispatch.oracle import Case
from tests.helpers.launch import RankPool
from tests.helpers.shared_files import shared_files
from tests.helpers.triton_device import triton_device

if triton_device() != "cpu":
    pytest.skip("interprets its kernels; see test_symmetric_gpu.py", allow_module_level=True)

Ranks = Callable[[int], RankPool]
CASES = [
    Case((13, 9), 5, 4, multiple=8),
    Case((0, 11), 7, 4),
    Case((0, 0), 3, 4),
    Case((5, 6), 4, 2, "none"),
    Case((13, 1, 0, 22), 5, 8, multiple=4),
    Case((7, 8, 9, 10), 3, 8, "all"),
    Case((7, 8, 9, 10), 4, 12, "last"),
]


def everything(transport: Transport, rank: int, case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """What a rank sees of one exchange; received rows by source and token, without gaps."""
    opened = transport.open(case.routing(rank), case.plan().of_rank(rank))
    receipt, P = opened.receipt, opened.gates_P.shape[0]
    x_TH = torch.randn(case.tokens[rank], case.H, generator=torch.Generator().manual_seed(rank)).to(dtype)
    values_PH = torch.randn(P, case.H, generator=torch.Generator().manual_seed(rank + 9)).to(dtype)
    rows = transport.dispatch(x_TH, receipt).clone()
    return {
        "rows": rows[used(receipt)],
        "rows of pairs": rows[receipt.row_of_pair_P.long()],
        "gates": opened.gates_P,
        "slots": receipt.slot_V,
        "starts": receipt.expert_starts_e,
        "weighted": transport.combine_pairs(values_PH, opened.gates_P, receipt),
        "plain": transport.combine_pairs(values_PH, None, receipt),
        "back": transport.combine(rows, receipt),
        "returned": transport.return_pairs(opened.gates_P, receipt),
    }


def used(receipt: Receipt) -> Tensor:
    return receipt.pair_starts_R.diff() > 0


def same_as_all_to_all(rank: int, case: Case, dtype: torch.dtype, folder: str) -> None:
    group = EPGroup()
    expected = everything(AllToAllTransport(group), rank, case, dtype)
    transport = SymmetricTransport(group, shared_files(group, folder), patience=60)
    for _ in range(2):
        actual = everything(transport, rank, case, dtype)
        for name, values in expected.items():
            assert torch.equal(actual[name], values), f"{name}: {actual[name]} {values}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_as_all_to_all(ranks: Ranks, case: Case, tmp_path: Path) -> None:
    ranks(case.size).run(same_as_all_to_all, case, torch.float32, str(tmp_path))
