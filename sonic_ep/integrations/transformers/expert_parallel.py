"""`SonicEP`: tokens reach the experts of other ranks by our dispatch, and come back by our combine.

Source: huggingface/transformers, src/transformers/distributed/expert_parallel.py, `EPImplementation`.

Legend: T tokens on this rank, H hidden size, K experts per token, e local experts.
"""

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import EPImplementation  # pyright: ignore[reportMissingImports]  # in 5.23

from sonic_ep.groups import EPGroup
from sonic_ep.integrations.options import SonicEPOptions
from sonic_ep.integrations.transformers.experts import DISPATCHED, checked_activation, compute_experts, hold_key
from sonic_ep.routers.given_routing import recording
from sonic_ep.transports import transport_for


class SonicEP(EPImplementation):
    """One object per module of experts. transformers makes it when it applies a `DistributedConfig` to a model.

    experts: the module, with this rank's e experts. ep_mesh: the ranks among which the experts are divided. tp_mesh:
    the ranks that hold the same batch. Each of these computes a slice of it, and all gather the results.

    Raises ValueError when the model is built, for experts that we do not compute: see `check`.
    """

    options = SonicEPOptions()

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        checked_activation(experts)
        setattr(experts, DISPATCHED, True)
        self._experts = experts
        self._group = EPGroup(ep_mesh.get_group())
        self._transport = transport_for(self._group, self.options.transport)
        hold_key(experts).call = self._compute

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns each token's weighted sum over its experts, (T, H) like hidden_states. A collective of the EP group.

        Shapes:  hidden_states (T, H); top_k_index (T, K) global expert ids, distinct in each row; top_k_weights (T, K).
        T may differ between ranks of the EP group that do not hold the same batch.
        """
        if self.tp_mesh.size() > 1 and recording():
            raise ValueError(
                f"record_routing with tp_size={self.tp_mesh.size()} would record a slice of the batch on each rank; "
                "set tp_size=1"
            )
        x_TH, ids_TK, weights_TK = (self._own_slice(each) for each in (hidden_states, top_k_index, top_k_weights))
        out_TH = self._compute(x_TH, ids_TK, weights_TK)
        if self.tp_mesh.size() == 1:
            return out_TH
        shape = hidden_states.shape
        whole: Any = DTensor.from_local(
            out_TH.contiguous(), self.tp_mesh, [Shard(0)], shape=shape, stride=(shape[1], 1)
        )
        return whole.full_tensor()

    def _compute(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return compute_experts(
            self._experts,
            x_TH,
            ids_TK,
            weights_TK,
            group=self._group,
            transport=self._transport,
            options=self.options,
            own_slice=self._own_slice,
        )

    def _own_slice(self, values: Tensor) -> Tensor:
        """Returns this rank's rows of what the ranks of a TP group have in common. Backward gathers them."""
        if self.tp_mesh.size() == 1:
            return values
        whole: Any = DTensor.from_local(values, self.tp_mesh, [Replicate()], run_check=False)
        return whole.redistribute(self.tp_mesh, [Shard(0)]).to_local()


def implementation_with(options: SonicEPOptions) -> type[SonicEP]:
    """Returns the class with these options, for `EPImplementationInterface.register`."""
    return type("SonicEP", (SonicEP,), {"options": options})
