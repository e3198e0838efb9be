"""The version of this package: here alone, and read by the build."""

__version__ = "0.1.0"
