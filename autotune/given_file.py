"""Files that others may have given: read whole, if they are files and of a size that such a file can have."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from autotune.errors import AutotuneError

MOST_BYTES = 4 * 2**20


def read_given(path: Path, *, named: str, hint: str, absent: str | None = None, most_bytes: int = MOST_BYTES) -> bytes:
    """The content of a regular file.

    `named` is that file in words, `hint` what to give instead, `absent` what to say of one that is not there.
    Raises AutotuneError for one that is not there, cannot be read, is no regular file (a pipe would keep us waiting, a
    device need not end) or holds more than `most_bytes`.
    """
    try:
        # a pipe is opened without waiting for somebody to write to it
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            kind = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(kind):
                said = os.strerror(errno.EISDIR) if stat.S_ISDIR(kind) else "it is no regular file"
                raise AutotuneError(f"cannot read {named}: {said}", hint=hint)
            content = file.read(most_bytes + 1)
    except FileNotFoundError as error:
        raise AutotuneError(absent or f"cannot read {named}: {error.strerror}", hint=hint) from None
    except (OSError, ValueError) as error:  # a name with a zero byte is a ValueError
        raise AutotuneError(f"cannot read {named}: {getattr(error, 'strerror', None) or error}", hint=hint) from None
    if len(content) > most_bytes:
        raise AutotuneError(f"{named} holds more than {most_bytes / 2**20:.0f} MiB", hint=hint)
    return content
