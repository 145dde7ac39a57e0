"""Optional packages: found missing before any work is done, and named with the pip line that installs them."""

from importlib.util import find_spec


def missing_extra(extra: str, *modules: str) -> str | None:
    """A sentence with the pip line if one of `modules`, which the extra installs, cannot be found."""
    missing = [module for module in modules if not _is_there(module)]
    return f"{', '.join(missing)} not found; pip install 'sonic-ep[{extra}]'" if missing else None


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it is in
        return False


def require_extra(extra: str, *modules: str) -> None:
    """Raise ImportError with that sentence, if there is one."""
    if problem := missing_extra(extra, *modules):
        raise ImportError(problem)
