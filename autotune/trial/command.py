"""The real command in the place of a worker: a fresh process, under the guard that ends it with all it starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NoReturn


def become(request: dict[str, Any], _folder: Path) -> NoReturn:
    """Be `program` with `arguments` from now on; what it says goes to the log of this child's folder."""
    os.execv(request["program"], request["arguments"])
