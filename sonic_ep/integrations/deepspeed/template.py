"""Recognises a template module as one of the MLPs that our kernels compute. DeepSpeed accepts any module and copies it.

Linear layers are found by their names. The activation is found by a trial: a copy of the template with random weights
is run in float64 on the CPU, and its output is compared with the output of each of our activations. So the module's
code decides, not the names in it. Any other template runs module by module (module_experts.py).

Legend: H hidden size, I expert width, J pre-activation columns (2I if gated else I).
"""

import copy
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sonic_ep.kernels.experts.activations import ACTIVATIONS

# down is last; of three, gate is first. Llama-like models, Mixtral; then MLPs of two layers, nn.Sequential among them.
_NAMES = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("up_proj", "down_proj"),
    ("fc1", "fc2"),
    ("w1", "w2"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("0", "2"),
)
SUPPORTED = (
    "Kernels compute down(act(gate(x)) * up(x)) with linear layers named gate_proj, up_proj, down_proj or w1, w3, w2, "
    "and fc2(act(fc1(x))) with linear layers named up_proj, down_proj or fc1, fc2 or w1, w2 or dense_h_to_4h, "
    "dense_4h_to_h or nn.Sequential(linear, act, linear); with or without biases, nothing else that has parameters "
    f"or buffers; act * up one of {', '.join(n for n, a in ACTIVATIONS.items() if a.gated)}, act one of "
    f"{', '.join(n for n, a in ACTIVATIONS.items() if not a.gated)} (gelu, geglu: GELU's tanh approximation, with _erf "
    "exact)"
)
_TRIAL_ROWS = 16
_PERIOD = 1_048_583  # of the random numbers in a trial's weights. Prime, so that no two rows are equal.


@dataclass(frozen=True, slots=True)
class Template:
    """The structure of a recognised template.

    first: names of the linear layers before the activation, (gate, up) or (up,). down: name of the one after it.
    activation: our name of the activation. bias1: True if the layers of `first` have biases. bias2: True if `down` has
    one. width: I.
    """

    first: tuple[str, ...]
    down: str
    activation: str
    bias1: bool
    bias2: bool
    width: int

    @property
    def gated(self) -> bool:
        return len(self.first) == 2

    def values(self, expert: nn.Module) -> dict[str, Tensor]:
        """Returns w1 (J, H), w2 (H, I) and, if there are biases, b1 (J,), b2 (H,) of an expert, as the kernels need."""
        first, down = [expert.get_submodule(name) for name in self.first], expert.get_submodule(self.down)
        values = {"w1": _in_turn([_tensor(each.weight) for each in first]), "w2": _tensor(down.weight)}
        if self.bias1:
            values["b1"] = _in_turn([_tensor(each.bias) for each in first])
        if self.bias2:
            values["b2"] = _tensor(down.bias)
        return values

    def trained(self, expert: nn.Module) -> dict[str, bool]:
        """Returns which of `values` require a gradient."""
        first, down = expert.get_submodule(self.first[0]), expert.get_submodule(self.down)
        of = {"w1": first.weight, "w2": down.weight, "b1": first.bias, "b2": down.bias}
        return {name: _tensor(of[name]).requires_grad for name in self.values(expert)}

    def entries(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `values`: returns views of its tensors, under the names of the expert's state dict."""
        step, entries = len(self.first), {}
        for kind, first, down in (("weight", "w1", "w2"), ("bias", "b1", "b2")):
            if first in values:
                entries |= {f"{name}.{kind}": values[first][at::step] for at, name in enumerate(self.first)}
            if down in values:
                entries[f"{self.down}.{kind}"] = values[down]
        return entries


def read_template(expert: nn.Module, hidden_size: int) -> Template | str:
    """Returns the Template of a module, or why no kernel computes it.

    Raises ValueError for what cannot be an expert: a module that returns something else than (rows, hidden_size), or
    that cannot be called on such rows because its linear layers have other sizes.
    """
    trial, names = _Trial.of(expert, hidden_size), _linear_names(expert)
    if trial.error is None and trial.shape != (_TRIAL_ROWS, hidden_size):
        raise ValueError(
            f"expert={_name(expert)} returns {trial.shape} for rows of shape {(_TRIAL_ROWS, hidden_size)}; an expert "
            f"maps each row of hidden_size={hidden_size} to one of that size"
        )
    if names is None:
        return trial.error or "it is none of the MLPs below"
    *first, down = (expert.get_submodule(name) for name in names)
    width = _tensor(first[0].weight).shape[0]
    wrong_size = _problem_with_sizes(first, down, width, hidden_size)
    if trial.error is not None:
        if wrong_size is not None:
            raise ValueError(f"expert={_name(expert)}: {wrong_size}")
        return trial.error
    problem = wrong_size or _problem_with_parameters(first)
    if problem is not None:
        return problem
    found = Template(tuple(names[:-1]), names[-1], "", first[0].bias is not None, down.bias is not None, width)
    activation = trial.activation(found)
    if activation is None:
        return f"it computes something else with its linear layers {', '.join(names)}"
    return Template(found.first, found.down, activation, found.bias1, found.bias2, width)


def _linear_names(expert: nn.Module) -> tuple[str, ...] | None:
    """Returns the entry of _NAMES that covers all parameters of the module, or None. None also if it has buffers."""
    owned = {name for name, _ in expert.named_parameters()}
    if any(True for _ in expert.buffers()):
        return None
    modules = dict(expert.named_modules())
    for names in _NAMES:
        wanted = {f"{name}.{kind}" for name in names for kind in ("weight", "bias")}
        found = all(_is_linear(modules.get(name)) for name in names)
        if found and owned <= wanted:
            return names
    return None


def _is_linear(module: nn.Module | None) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2 and hasattr(module, "bias")


def _problem_with_sizes(first: list[nn.Module], down: nn.Module, width: int, hidden_size: int) -> str | None:
    for each in first:
        shape = tuple(_tensor(each.weight).shape)
        if shape != (width, hidden_size):
            return f"a first linear layer has weight {shape}, wanted (width, hidden_size={hidden_size}), all alike"
    shape = tuple(_tensor(down.weight).shape)
    if shape != (hidden_size, width):
        return f"the last linear layer has weight {shape}, wanted {(hidden_size, width)}"
    return None


def _problem_with_parameters(first: list[nn.Module]) -> str | None:
    if len({each.bias is None for each in first}) > 1:
        return "of gate and up only one has a bias"
    for kind in ("weight", "bias"):
        if len({getattr(getattr(each, kind), "requires_grad", None) for each in first}) > 1:
            return f"of gate and up only one has a frozen {kind}, and a kernel reads them as one parameter"
    return None


@dataclass(frozen=True, slots=True)
class _Trial:
    """A copy of the template with random weights, in float64 on the CPU, and what it returned for random rows.

    out: its output, None with an `error`. error: why it could not be called, or None.
    """

    copied: nn.Module | None
    x: Tensor
    out: object
    error: str | None

    @classmethod
    @torch.no_grad()
    def of(cls, expert: nn.Module, hidden_size: int) -> Self:
        generator = torch.Generator().manual_seed(0)

        def drawn(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, dtype=torch.float64, device="cpu")

        numbers = drawn(_PERIOD)
        trials: dict[int, object] = {}  # the parameters of the copy, by id of the original
        for parameter in expert.parameters():
            # Pre-activations have magnitudes of a few units, so that clamps and tails of activations show.
            spread = 4 / parameter.shape[-1] ** 0.5 if parameter.dim() == 2 else 1.0
            values = (numbers * spread).repeat(-(-parameter.numel() // _PERIOD))[: parameter.numel()]
            trials[id(parameter)] = nn.Parameter(values.view(parameter.shape), requires_grad=False)
            numbers = numbers.roll(1)
        x, copied = drawn(_TRIAL_ROWS, hidden_size), None
        try:
            copied = copy.deepcopy(expert, trials).train()  # so that dropout changes the output
            with torch.random.fork_rng(devices=[]):
                out = copied(x)
        except Exception as error:  # noqa: BLE001  # any code of the user's
            problem = f"it could not be tried on ({_TRIAL_ROWS}, {hidden_size}) float64 rows: {error}"
            return cls(copied, x, None, problem)
        return cls(copied, x, out[0] if isinstance(out, tuple) else out, None)  # as DeepSpeed does

    @property
    def shape(self) -> tuple[int, ...] | str:
        return tuple(self.out.shape) if isinstance(self.out, Tensor) else type(self.out).__name__

    @torch.no_grad()
    def activation(self, found: Template) -> str | None:
        """Returns the activation with which our MLP has the same output as the module, or None."""
        assert self.copied is not None
        out = _tensor(self.out)
        values = found.values(self.copied)
        for name, activation in ACTIVATIONS.items():
            if activation.gated == found.gated:
                h = activation.forward(F.linear(self.x, values["w1"], values.get("b1")))
                y = F.linear(h, values["w2"], values.get("b2"))
                if torch.allclose(out, y, rtol=1e-7, atol=1e-7):
                    return name
        return None


def _in_turn(parts: list[Tensor]) -> Tensor:
    """Interleaves the rows of the parts. Returns a single part as it is."""
    return parts[0] if len(parts) == 1 else torch.stack(parts, 1).flatten(0, 1)


def _tensor(value: object) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def _name(expert: nn.Module) -> str:
    return type(expert).__name__
