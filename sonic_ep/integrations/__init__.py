"""Adapters to other training frameworks. Nothing in the package imports them."""
