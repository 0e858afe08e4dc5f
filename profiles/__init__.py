"""Tuned profiles: the portable result of a run."""

from profiles.profile import Profile as Profile
from profiles.profile import to_yaml as to_yaml
