"""Profiles: the portable result of a run, with its evidence and what it is valid for."""
