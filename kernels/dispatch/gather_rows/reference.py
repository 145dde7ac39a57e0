"""`gather_rows` in plain torch: the rows that are sent, behind each other.

The CPU path, and the oracle of kernels/dispatch/gather_rows/triton.py.

Legend: U rows this rank sends, H hidden size.
"""

from torch import Tensor


def gather_rows(values: Tensor, rows_U: Tensor) -> Tensor:
    """Returns (U, H): the rows of values (rows, H) that rows_U, (U,) int32, lists.

    Example:

        >>> import torch
        >>> from sonic_ep.kernels.dispatch.gather_rows.reference import gather_rows
        >>> gather_rows(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1, 1, 0])).tolist()
        [[3.0, 4.0], [3.0, 4.0], [1.0, 2.0]]
    """
    return values.index_select(0, rows_U)
