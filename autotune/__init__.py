"""Find the fastest way to run a TRL training job on this machine, with proof."""

__version__ = "0.1.0"
