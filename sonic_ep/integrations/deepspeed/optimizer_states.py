"""A stop for optimizer states that were saved at another ep_size, or for experts of another layout.

They lie in flat pieces, one expert behind the other, and DeepSpeed compares no more than sizes, if that: moments of
other experts would be loaded, and nothing said. But its parameter groups carry the name of their expert-parallel group,
and torch's optimizers save the groups with the moments.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.moe.layer import MoE as StockMoE
from deepspeed.runtime.engine import DeepSpeedEngine
from torch.optim import Optimizer

_MARK = "sonic_ep_guard"


def guard_optimizer_states() -> None:
    """From now on every engine's load_checkpoint raises ValueError, on all ranks, for expert states of another ep_size.

    load_optimizer_states=False and load_module_only=True load the weights alone, from any ep_size.
    """
    original = DeepSpeedEngine.load_checkpoint
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def load_checkpoint(self: DeepSpeedEngine, *args: Any, **kwargs: Any) -> Any:
        # Not AutoEP's layers, see autoep.py: a universal checkpoint renames their groups, and files tell their ep_size.
        has_experts = any(isinstance(module, StockMoE) for module in self.module.modules())  # type: ignore[union-attr]
        with _compared(getattr(self, "basic_optimizer", None) if has_experts else None):
            return original(self, *args, **kwargs)

    setattr(load_checkpoint, _MARK, True)
    DeepSpeedEngine.load_checkpoint = load_checkpoint


@contextmanager
def _compared(optimizer: Any) -> Iterator[None]:
    if not isinstance(optimizer, Optimizer):
        yield
        return
    hook = optimizer.register_load_state_dict_pre_hook(_compare)
    try:
        yield
    finally:
        hook.remove()


def _compare(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    saved, own = _expert_groups(state_dict["param_groups"]), _expert_groups(optimizer.param_groups)
    if saved != own:
        raise ValueError(
            f"the checkpoint's optimizer states are of expert groups {saved}, this engine has {own}: states of another "
            "ep_size hold other experts; use the ep_size of the checkpoint, or load the weights alone with "
            "load_checkpoint(..., load_optimizer_states=False)"
        )


def _expert_groups(groups: list[dict[str, Any]]) -> list[str]:
    return sorted({str(group.get("name")) for group in groups if group.get("moe")})
