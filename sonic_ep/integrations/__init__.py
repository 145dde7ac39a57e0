"""Adapters to other training frameworks. Nothing else in the package imports them."""
