"""How our layer treats every argument of deepspeed.moe.layer.MoE: honoured, or without effect (warned).

docs/deepspeed.md shows this table.
"""

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from deepspeed.moe.layer import MoE as StockMoE

from sonic_ep.config import MAX_E, MAX_K

_POLICIES = (None, "None", "Jitter", "RSample")
_DROPS_NOTHING = "nothing is dropped, so there is no capacity to set"


@dataclass(frozen=True, slots=True)
class Option:
    """One argument. neutral: the value that causes no warning; None: DeepSpeed's default."""

    name: str
    effect: Literal["honoured", "warned"]
    how: str
    neutral: Any = None


OPTIONS: tuple[Option, ...] = (
    Option("hidden_size", "honoured", "d"),
    Option("expert", "honoured", "a template that kernels compute; any other runs module by module, with a warning"),
    Option("num_experts", "honoured", f"E, 1 to {MAX_E}, a multiple of ep_size"),
    Option("ep_size", "honoured", "DeepSpeed's expert-parallel group of that size"),
    Option("k", "honoured", f"experts a token, 1 to {MAX_K}"),
    Option("drop_tokens", "warned", "True: this layer never drops tokens, and computes as drop_tokens=False", False),
    Option("capacity_factor", "warned", _DROPS_NOTHING),
    Option("eval_capacity_factor", "warned", _DROPS_NOTHING),
    Option("min_capacity", "warned", _DROPS_NOTHING),
    Option("use_rts", "warned", "nothing is dropped, at random or otherwise"),
    Option("use_residual", "honoured", "residual MoE: the template itself is the dense MLP"),
    Option(
        "noisy_gate_policy",
        "honoured",
        "None, 'Jitter' and 'RSample', which DeepSpeed reads for k=1 alone",
    ),
    Option("use_tutel", "warned", "the layer has kernels of its own"),
    Option(
        "enable_expert_tensor_parallelism",
        "honoured",
        "it has an effect only with tensor parallelism, with which the layer is refused, see below",
    ),
    Option(
        "top2_2nd_expert_sampling",
        "warned",
        "True with k=2, DeepSpeed's default: the second expert is always the second best, as with False",
        False,
    ),
)


def table() -> list[str]:
    """Returns OPTIONS as a Markdown table."""
    lines = ["| argument | here | how, or why not |", "|---|---|---|"]
    return lines + [f"| `{each.name}` | {each.effect} | {each.how} |" for each in OPTIONS]


def check(arguments: Mapping[str, Any]) -> None:
    """Raises ValueError, with argument, value and fix, for what the layer cannot honour. Warns about what it ignores.

    One warning names all ignored arguments. Python shows equal warnings of one line once.
    """
    problem = _problem(arguments)
    if problem is not None:
        raise ValueError(problem)
    defaults = {name: each.default for name, each in inspect.signature(StockMoE.__init__).parameters.items()}
    ignored = []
    for option in OPTIONS:
        value = arguments.get(option.name)
        neutral = defaults[option.name] if option.neutral is None else option.neutral
        if option.name == "top2_2nd_expert_sampling" and arguments["k"] != 2:
            continue  # DeepSpeed reads it only for k=2
        if option.effect == "warned" and value != neutral:
            ignored.append(f"{option.name}={value!r} ({option.how})")
    if arguments["noisy_gate_policy"] == "RSample" and arguments["k"] > 1:
        ignored.append(f"noisy_gate_policy='RSample' (DeepSpeed reads it only for k=1, k={arguments['k']} here)")
    if ignored:
        warnings.warn(f"without effect in sonic_ep's MoE: {'; '.join(ignored)}", UserWarning, stacklevel=3)


def _problem(arguments: Mapping[str, Any]) -> str | None:
    for name, limit in (("hidden_size", None), ("num_experts", MAX_E), ("ep_size", None), ("k", MAX_K)):
        value = arguments[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1 or (limit is not None and value > limit):
            wanted = "an integer >= 1" if limit is None else f"an integer in 1..{limit}"
            return f"{name}={value!r} must be {wanted}" + (
                "; give every layer its own number" if isinstance(value, list) else ""
            )
    experts, ep_size, k = arguments["num_experts"], arguments["ep_size"], arguments["k"]
    if experts % ep_size:
        return f"num_experts={experts} is not a multiple of ep_size={ep_size}; use an ep_size that divides it"
    if k > experts:
        return f"k={k} experts a token exceed num_experts={experts}; lower k"
    policy = arguments["noisy_gate_policy"]
    if policy not in _POLICIES:
        return f"noisy_gate_policy={policy!r} is none of DeepSpeed's; set one of {', '.join(map(str, _POLICIES))}"
    return None
