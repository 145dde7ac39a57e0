"""Checks for optional packages. Errors name the missing ones and the pip command that installs them."""

from importlib.util import find_spec


def missing_extra(extra: str, *modules: str) -> str | None:
    """Returns a sentence with the pip command if one of `modules`, which the extra installs, is missing, else None."""
    missing = [module for module in modules if not _is_there(module)]
    return f"{', '.join(missing)} not found; pip install 'sonic-ep[{extra}]'" if missing else None


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def require_extra(extra: str, *modules: str) -> None:
    """Raises ImportError with the sentence of `missing_extra`, if there is one."""
    if problem := missing_extra(extra, *modules):
        raise ImportError(problem)
