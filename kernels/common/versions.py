"""The versions of quack and CuTe-DSL that the GPU kernels work with.

This module imports neither, so the check can run before they are imported.
"""

from importlib.metadata import PackageNotFoundError, version

# The same versions as in the extra "cuda" of pyproject.toml. Our kernels override methods of quack's classes, which may
# change in any release.
SUPPORTED = {"quack-kernels": "0.6.5", "nvidia-cutlass-dsl": "4.8.1"}


def problem_with_versions() -> str | None:
    """Returns a sentence that names the installed and the supported version and the pip line, or None if all fit."""
    for package, supported in SUPPORTED.items():
        installed = installed_version(package)
        if installed != supported:
            return (
                f"{package} {installed or 'without a version'} is installed, the GPU kernels work with {supported}; "
                "pip install 'sonic-ep[cuda]'"
            )
    return None


def installed_version(package: str) -> str | None:
    """Returns the version of an installed package, or None if pip did not install it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
