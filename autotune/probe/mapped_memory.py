"""Pages of data files that Arrow maps into this process, and giving them back."""

from __future__ import annotations

import ctypes
from pathlib import Path

MADV_DONTNEED = 4


def give_back(ending: str = ".arrow") -> None:
    """Let go of the pages of mapped files whose name ends so: they are on the disk, and are read again when needed.

    Without it every page that was read counts as this process's memory until the kernel runs short (Linux only;
    nothing happens elsewhere).
    """
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in lines:
        span, rights, *_ = line.split(maxsplit=2)
        if line.endswith(ending) and "w" not in rights:
            start, end = (int(bound, 16) for bound in span.split("-"))
            advise(start, end - start, MADV_DONTNEED)
