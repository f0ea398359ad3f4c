"""The version, in the one place that also names it to the package build. Readable without an installed distribution."""

__version__ = "0.1.0"
