"""`interleaved` in plain torch: gate and up weights in two tensors, copied into one operand of a GEMM.

The oracle of kernels/interleave/triton.py. On the CPU the experts call `interleave_split` themselves.

Legend: e local experts, I expert width, J pre-activation columns (2I if gated else I), H hidden size.
"""

from torch import Tensor

from sonic_ep.kernels.experts.activations import interleave_split


def interleaved(gate_eIH: Tensor, up_eIH: Tensor) -> Tensor:
    """Returns (e, J, H), contiguous, with the rows of gate and up in turns.

    Shapes:  gate_eIH and up_eIH (e, I, H), of equal strides, with contiguous experts.
    Example: an expert of width 2.

        >>> import torch
        >>> from sonic_ep.kernels.interleave.reference import interleaved
        >>> interleaved(torch.tensor([[[1.0], [2.0]]]), torch.tensor([[[3.0], [4.0]]])).flatten().tolist()
        [1.0, 3.0, 2.0, 4.0]
    """
    return interleave_split(gate_eIH, up_eIH)
