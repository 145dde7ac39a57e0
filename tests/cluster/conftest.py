"""The fixtures of the examples' tests: a small model, and how a user trains it on one host."""

from tests.examples.conftest import launch, small

__all__ = ["launch", "small"]
