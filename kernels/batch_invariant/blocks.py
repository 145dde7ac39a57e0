"""Rows in blocks of a fixed number: the results of a row have the same bits whatever other rows there are.

GEMMs of torch choose by the number of rows how they add. With a fixed number all rows of a block add alike, if d and n
are multiples of 8, which `MoEConfig` sees to. On a CPU elementwise functions compute the rest that fills no vector by
other instructions; a block leaves no rest.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

_CPU_ROWS, _GPU_ROWS = 32, 1024


def rows_of_block(values: Tensor) -> int:
    """Returns the number of rows of a block on the device of `values`."""
    return _GPU_ROWS if values.is_cuda else _CPU_ROWS


def padded(rows: Tensor) -> Tensor:
    """Returns (rows, ...) with zeros behind them, up to a whole number of blocks; contiguous."""
    missing = -rows.shape[0] % rows_of_block(rows)
    return pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows.contiguous()


def by_blocks(compute: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """Returns the joined results of `compute` for each block of `rows`, tensors with as many rows.

    Example: 2 rows are a block with 30 rows of zeros.

        >>> import torch
        >>> from sonic_ep.kernels.batch_invariant.blocks import by_blocks
        >>> by_blocks(lambda rows: rows * rows.shape[0], torch.tensor([[1.0], [2.0]])).tolist()
        [[32.0], [64.0]]
    """
    blocks = zip(*(padded(each).split(rows_of_block(each)) for each in rows), strict=True)
    return torch.cat([compute(*block) for block in blocks])[: rows[0].shape[0]]
