"""Small models of many families with random weights, and the data each is trained on."""

from tests.families.configured import CONFIGURED
from tests.families.family import Family
from tests.families.written import WRITTEN

FAMILIES: list[Family] = [*WRITTEN, *CONFIGURED]
"""Every family there is, the ones written here first."""
