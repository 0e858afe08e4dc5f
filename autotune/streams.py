"""The standard streams, such that anything can be written to them."""

from __future__ import annotations

import io
import os
import sys

LEAST_COLUMNS = 40  # where `COLUMNS` says less, nothing that is written could be read


def make_writable() -> None:
    """Make stdin, stdout and stderr whole, whatever this process was started with.

    A stream that is closed (`>&-`) goes to the null device: Python has None there, and the next file that is opened
    would take its number and get what is printed. Characters that a stream's encoding lacks are written as `?`.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest number that is free: this one
        stream = getattr(sys, name)
        if stream is None:
            mode = "r" if number == 0 else "w"
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", errors="replace", closefd=False))
        elif number and isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
    columns = os.environ.get("COLUMNS", "")
    if columns.isascii() and columns.isdecimal() and int(columns[:9]) < LEAST_COLUMNS:
        os.environ["COLUMNS"] = str(LEAST_COLUMNS)


def let_go_of_stdout() -> None:
    """Send what is still to be written to stdout nowhere: it cannot be written, and Python would try again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
