"""Safehold saves and restores the whole state of a distributed training run."""

from safehold._version import __version__

__all__ = ["__version__"]
