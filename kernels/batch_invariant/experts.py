"""The experts' operations in plain torch with the same bits for a pair whatever other pairs there are.

Those of kernels/experts/reference.py, on blocks of the rows of one expert. Sums over rows, the gradients of weights and
biases, depend on the batch.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from sonic_ep.kernels.experts import reference

Given = ParamSpec("Given")
Result = TypeVar("Result")

accumulate_product = reference.accumulate_product
accumulate_up_projection = reference.accumulate_up_projection
weight_grad = reference.weight_grad
bias_grad = reference.bias_grad
gathered_bias_grad = reference.gathered_bias_grad


def _in_blocks(operation: Callable[Given, Result]) -> Callable[Given, Result]:
    @functools.wraps(operation)
    def run(*arguments: Given.args, **options: Given.kwargs) -> Result:
        before = reference.in_blocks.set(True)
        try:
            return operation(*arguments, **options)
        finally:
            reference.in_blocks.reset(before)

    return run


up_projection = _in_blocks(reference.up_projection)
down_projection = _in_blocks(reference.down_projection)
down_projection_backward = _in_blocks(reference.down_projection_backward)
up_projection_backward = _in_blocks(reference.up_projection_backward)
