"""What every part of a recipe is made of: a strict struct, and the plain types its fields share.

Knows no field; `core.recipe` and `core.data.source` define them.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Positive = Annotated[float, Meta(gt=0.0)]
Decay = Annotated[float, Meta(ge=0.0, lt=1.0)]  # of a running mean
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]  # what numpy, torch and the server all take


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of the recipe; an unknown key is an error, not a default."""
