"""Optional packages: found missing before any work is done, and named with the pip line that installs them."""

from importlib.util import find_spec


def require_extra(extra: str, *modules: str) -> None:
    """Raise ImportError, with the pip line, unless all top-level `modules` that the extra installs can be found."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise ImportError(f"{', '.join(missing)} not found; pip install 'sonic-ep[{extra}]'")
