"""Refuses to load optimizer states that were saved at another ep_size, or for experts of another layout.

DeepSpeed stores these states as flat pieces, expert after expert, and compares at most their sizes. So it would load
the moments of other experts without an error. Each of its two layers says elsewhere which ep_size they are of:

  MoE     its parameter groups have the name of their expert-parallel group, and torch's optimizers save the parameter
          groups with the moments. We add the ep_size of every layer, in order, to these groups, and compare both when
          states are loaded.
  AutoEP  a universal checkpoint, which holds the states of any ep_size, renames the groups. But files of other
          checkpoints list the layers with their ep_size, and we compare that.

No layer is asked when an engine saves or loads optimizer states, and torch has no hook for all optimizers. So functions
of DeepSpeedEngine are wrapped.
"""

import functools
from collections.abc import Callable

from deepspeed.checkpoint.constants import AUTOEP_LAYERS_KEY, AUTOEP_LAYERS_KEY_LEGACY
from deepspeed.moe.layer import MoE as StockMoE
from deepspeed.runtime.engine import DeepSpeedEngine
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

_SIZES = "ep_sizes_of_layers"  # a key of the experts' parameter groups


def wrap(cls: type, name: str, wrapper: Callable[..., object]) -> Callable[[], None]:
    """Makes `cls.name(self, ...)` call `wrapper(stock, self, ...)`, stock being the original. Returns the undoing."""
    stock = getattr(cls, name)

    @functools.wraps(stock)
    def wrapped(*args: object, **kwargs: object) -> object:
        return wrapper(stock, *args, **kwargs)

    setattr(cls, name, wrapped)
    return functools.partial(setattr, cls, name, stock)


@functools.cache
def guard_optimizer_states() -> None:
    """Makes every engine's load_checkpoint raise ValueError, on all ranks, for expert states of another ep_size.

    With load_optimizer_states=False or load_module_only=True it loads only the weights, from any ep_size.
    """
    wrap(DeepSpeedEngine, "load_checkpoint", _load_checkpoint)
    wrap(DeepSpeedEngine, "save_checkpoint", _save_checkpoint)


def _load_checkpoint(stock: Callable[..., object], engine: DeepSpeedEngine, *args: object, **kwargs: object) -> object:
    optimizer = _name_sizes(engine)
    hook = None if optimizer is None else optimizer.register_load_state_dict_pre_hook(_compare)
    try:
        return stock(engine, *args, **kwargs)
    finally:
        if hook is not None:
            hook.remove()


def _save_checkpoint(stock: Callable[..., object], engine: DeepSpeedEngine, *args: object, **kwargs: object) -> object:
    _name_sizes(engine)
    return stock(engine, *args, **kwargs)


def _name_sizes(engine: DeepSpeedEngine) -> Optimizer | None:
    """Adds the ep_sizes of MoE layers to the parameter groups with their experts. Returns the optimizer, if any has."""
    modules = engine.module.modules()  # type: ignore[union-attr]
    sizes = [int(module.ep_size) for module in modules if isinstance(module, StockMoE)]
    optimizer = getattr(engine, "basic_optimizer", None)
    if not isinstance(optimizer, Optimizer) or not sizes:
        return None
    for group in optimizer.param_groups:
        if group.get("moe"):
            group[_SIZES] = sizes
    return optimizer


def _compare(optimizer: Optimizer, state_dict: StateDict) -> None:
    saved, own = _expert_groups(state_dict["param_groups"]), _expert_groups(optimizer.param_groups)
    if saved != own:
        raise ValueError(
            f"the checkpoint's optimizer states are of expert groups {saved}, this engine has {own}: states of another "
            "ep_size hold other experts; use the ep_size of the checkpoint, or load the weights alone with "
            "load_checkpoint(..., load_optimizer_states=False)"
        )
    theirs, ours = _sizes_in(state_dict["param_groups"]), _sizes_in(optimizer.param_groups)
    if theirs is not None and theirs != ours:  # checkpoints of older versions have none
        raise ValueError(
            f"the checkpoint's MoE layers have ep_size {theirs}, in their order, this model's have {ours}: optimizer "
            "states of another ep_size hold other experts; use the checkpoint's, or load the weights alone with "
            "load_checkpoint(..., load_optimizer_states=False)"
        )


def _sizes_in(groups: list[StateDict]) -> list[int] | None:
    return next((group[_SIZES] for group in groups if _SIZES in group), None)


def _expert_groups(groups: list[StateDict]) -> list[str]:
    return sorted({str(group.get("name")) for group in groups if group.get("moe")})


def refuse_other_autoep_size(engine: DeepSpeedEngine, ep_sizes: set[int], load_dir: str, tag: str) -> None:
    """Raises ValueError if the optimizer state of a checkpoint is of another ep_size than AutoEP's layers.

    ep_sizes: of our layers in the engine; at most one.
    """
    files = engine._get_all_ckpt_names(load_dir, tag)
    if not ep_sizes or not files:
        return  # without a file, DeepSpeed reports it
    (own,) = ep_sizes
    saved = engine.checkpoint_engine.load(files[0], map_location="cpu")  # type: ignore[union-attr]
    entries = saved.get(AUTOEP_LAYERS_KEY) or saved.get(AUTOEP_LAYERS_KEY_LEGACY) or ()
    sizes = {entry["ep_size"] for entry in entries} - {own}
    if sizes:
        raise ValueError(
            f"the checkpoint {load_dir}/{tag} was saved at autoep_size={sizes.pop()}, this engine has "
            f"autoep_size={own}: its optimizer state belongs to other experts. Convert it with "
            'deepspeed/checkpoint/ds_to_universal.py and load it with {"checkpoint": {"load_universal": true}}, or '
            "take the weights alone: load_checkpoint(..., load_module_only=True)"
        )
