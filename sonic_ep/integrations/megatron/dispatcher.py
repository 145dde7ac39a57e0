"""`NoDispatcher` stands where Megatron's code expects a layer's token dispatcher, and moves no row.

Our dispatch is inside the experts' computation. The rest is what others read and set here: the routing map and the
padding, which a CUDA graph of the router hands on, the shared expert that overlaps, and marks of inference.

Legend: O tokens with padding, T tokens on this rank, E experts, H hidden size.
"""

from types import SimpleNamespace
from typing import Any, final

from torch import Tensor

from sonic_ep.routers.given_routing import NOTHING_GIVEN, GivenRouting
from sonic_ep.routing import Routing


@final
class NoDispatcher:
    """Carries a routing from the step after the router to the experts.

    copies: whether the steps return copies. The schedule of overlapping batches frees the memory of what it hands to a
    step, which Megatron's dispatchers have sent or permuted by then, and which here the next step reads.
    shared_experts: a SharedExpertMLP that overlaps, which `token_dispatch` starts, or None. drop_and_pad: inference
    sets it in every layer's dispatcher; the router reads the config's instead.
    padding_O: bool, True for padding, or None. problem: of this rank with its mask or with the ids of a replay, or
    None. is_replayed: whether the router took ids of a replay.
    """

    def __init__(self, *, copies: bool) -> None:
        self._copies = copies
        self.shared_experts: Any = None
        self.drop_and_pad = False
        # A graph of router and preprocessing gives those that are tensors back, and a replay sets them.
        self.cudagraph_attrs = ["routing_map", "padding_O"]
        self.valid_cudagraph_attrs: list[str] | None = None
        self.routing_map: Tensor | None = None
        # Of a batch that overlaps, with rounding, and the padding that it left out.
        self.rounded: tuple[Routing, GivenRouting] | None = None
        self.padding_O: Tensor | None = None
        self.problem: str | None = None
        self.is_replayed = False
        # Overlapped batches set probabilities here, for DeepEP's and HybridEP's buffers.
        self._comm_manager = SimpleNamespace(get_number_of_tokens_per_expert=lambda: None)

    def note_padding(self, hidden_states: Tensor, padding_mask: Tensor | None) -> Tensor | None:
        """Returns the mask for the router, (s, b) bool like `padding_mask`: None if it is not of these (s, b, h)."""
        self.rounded, self.padding_O, self.problem, self.is_replayed = None, None, None, False
        if padding_mask is None:
            return None
        if padding_mask.shape != hidden_states.shape[:2]:
            (s, b), shape = hidden_states.shape[:2], tuple(padding_mask.T.shape)
            self.problem = f"padding_mask has shape {shape}, wanted (b={b}, s={s}) of this rank's hidden states"
            return None
        self.padding_O = padding_mask.reshape(-1)
        return padding_mask

    def given(self, x_OH: Tensor) -> GivenRouting:
        """Returns which rows of x are padding. The host waits if there is a mask and rounding has not waited."""
        if self.rounded is not None:
            return self.rounded[1]
        if self.problem is not None:
            return GivenRouting(x_OH.shape[:1], problem=self.problem)
        if self.padding_O is None:
            return NOTHING_GIVEN
        return GivenRouting.of(x_OH, None, self.padding_O, E=1, K=1)

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Notes the map, (T, E) bool. Returns hidden_states and probs."""
        self.routing_map = routing_map
        return self.own(hidden_states), self.own(probs)

    def own(self, tensor: Tensor) -> Tensor:
        """Returns a copy that may outlive `tensor`, or with `copies` off the tensor itself."""
        return tensor.clone() if self._copies else tensor

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Starts the shared expert on its stream. Returns hidden_states, (s, b, H), and probs."""
        shared = self.shared_experts
        if shared is not None:
            shared.pre_forward_comm(hidden_states)
            shared.linear_fc1_forward_and_act()
            shared.linear_fc2_forward()
            shared.post_forward_comm()
        return self.own(hidden_states), self.own(probs)

    def pop_routing(self) -> Routing | Tensor:
        """Returns what was noted, and forgets it: of rounding, else the map."""
        rounded, routing_map = self.rounded, self.routing_map
        self.rounded = self.routing_map = None
        self.padding_O, self.problem = None, None
        if rounded is not None:
            return rounded[0]
        assert routing_map is not None  # dispatch_preprocess or a graph has set it
        return routing_map

    def token_combine(self, output: Tensor) -> Tensor:
        """Returns the output, which the experts have combined."""
        return self.own(output)

    def combine_postprocess(self, output: Tensor) -> Tensor:
        """Returns the output plus the output of a shared expert that overlapped."""
        return output if self.shared_experts is None else output + self.shared_experts.get_output()
