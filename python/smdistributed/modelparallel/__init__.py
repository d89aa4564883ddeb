"""The package name of the withdrawn product, over smp (docs/python/withdrawn.md)."""

# The interface is that of this version; programs ask for it.
__version__ = "1.15.0"
