"""Which versions of quack and CuTe-DSL the GPU kernels work with.

This module imports neither of them, so that it can answer before they are imported.
"""

from importlib.metadata import PackageNotFoundError, version

# By package: those of the extra "cuda" in pyproject.toml. Our kernels override methods of quack's, which change in any
# of its releases.
SUPPORTED = {"quack-kernels": "0.6.5", "nvidia-cutlass-dsl": "4.8.1"}


def problem_with_versions() -> str | None:
    """Returns a sentence that names the installed and the supported version and the pip line, or None if all fit."""
    for package, supported in SUPPORTED.items():
        installed = _installed(package)
        if installed != supported:
            return (
                f"{package} {installed or 'without a version'} is installed, the GPU kernels work with {supported}; "
                "pip install 'sonic-ep[cuda]'"
            )
    return None


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # what is imported was not installed by pip
        return None
