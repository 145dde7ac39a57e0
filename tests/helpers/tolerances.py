"""Comparisons that can fail: an absolute tolerance above the values compared hides whatever differs.

`limit_tolerances` is called in every process of the tests, ranks too. From then on torch.testing.assert_close and
torch.allclose refuse what passes only by an `atol` above SHARE of the largest expected value. That includes torch's own
default of 1e-5 for fp32. Where expected values are what rounding leaves of larger ones, `assert_near` takes those.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.testing._comparison import default_tolerances

TESTS = str(Path(__file__).resolve().parents[1])
SHARE = 0.05  # what bf16 leaves after several layers
_torchs_assert_close, _torchs_allclose, _tensors_allclose = torch.testing.assert_close, torch.allclose, Tensor.allclose


def assert_near(
    actual: Any,
    expected: Any,
    *,
    share: float,
    scale: float | None = None,
    equal_nan: bool = False,
    msg: str | Callable[[str], str] | None = None,
) -> None:
    """Raises AssertionError if a value is off by more than `share` of itself plus `share` of `scale`.

    scale: the largest expected value; stated where all expected values may be what rounding leaves of larger ones.
    """
    scale = _largest(expected) if scale is None else scale
    _torchs_assert_close(actual, expected, rtol=share, atol=share * scale, equal_nan=equal_nan, msg=msg)


def is_near(actual: Tensor, expected: Tensor, *, share: float, scale: float | None = None) -> bool:
    """Whether `assert_near` would pass; tensors of other shapes or dtypes raise RuntimeError."""
    scale = _largest(expected) if scale is None else scale
    return _torchs_allclose(actual, expected, rtol=share, atol=share * scale)


def limit_tolerances() -> None:
    """Replaces the comparisons of torch by those of this file, for callers in tests/."""
    torch.testing.assert_close = _limited(_torchs_assert_close, _refuse_large_atol)
    torch.allclose = _limited(_torchs_allclose, _refuse_large_atol_of_allclose)
    Tensor.allclose = _limited(_tensors_allclose, _refuse_large_atol_of_allclose)


def _limited(compare: Callable[..., Any], refuse: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(compare)
    def limited(*args: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        result = compare(*args, **options)
        # Product code, and packages that it calls, compare as they like.
        if result is not False and sys._getframe(1).f_code.co_filename.startswith(TESTS):
            refuse(*args, **options)
        return result

    return limited


def _refuse_large_atol_of_allclose(
    actual: Tensor, expected: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> None:
    __tracebackhide__ = True
    _refuse_large_atol(actual, expected, rtol=rtol, atol=atol, equal_nan=equal_nan)


def _refuse_large_atol(
    actual: Any,
    expected: Any,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    equal_nan: bool = False,
    **options: Any,
) -> None:
    """Raises AssertionError if the comparison has passed by an atol that is large against what is expected."""
    __tracebackhide__ = True
    del options  # strides, devices and dtypes have been compared
    for got, wanted in _leaves(actual, expected):
        of_got, of_wanted = torch.as_tensor(got).detach(), torch.as_tensor(wanted).detach()
        default_rtol, default_atol = default_tolerances(of_got, of_wanted)
        given = default_atol if atol is None else atol
        limit = SHARE * _largest(of_wanted)
        if given <= limit:
            continue
        try:
            _torchs_assert_close(
                of_got,
                of_wanted,
                rtol=default_rtol if rtol is None else rtol,
                atol=limit,
                equal_nan=equal_nan,
                check_device=False,
                check_dtype=False,
                check_layout=False,
            )
        except AssertionError as error:
            raise AssertionError(
                f"atol={given:g} is above {SHARE:g} of the largest expected value, {limit / SHARE:g}, and hides what "
                "differs: compare larger values, give less, or state the scale of what rounds by assert_near of "
                f"tests/helpers/tolerances.py\n{error}"
            ) from None


def _leaves(actual: Any, expected: Any) -> Iterator[tuple[Any, Any]]:
    """The tensors and numbers of two structures that assert_close has found to be alike."""
    if isinstance(expected, Mapping):
        for key, wanted in expected.items():
            yield from _leaves(actual[key], wanted)
    elif isinstance(expected, list | tuple):
        for got, wanted in zip(actual, expected, strict=True):
            yield from _leaves(got, wanted)
    elif isinstance(expected, Tensor | float | complex):
        yield actual, expected


def _largest(expected: Any) -> float:
    """The largest finite |value|, 0 where there is none."""
    values = torch.as_tensor(expected).detach().flatten()
    sizes = (values if values.is_complex() else values.double()).abs()
    sizes = sizes[sizes.isfinite()]
    return float(sizes.max()) if sizes.numel() else 0.0
