"""What went wrong in a trial, from the exception or from what was printed: its outcome and the error that came first.

Words stand here as the libraries print them; `tests/data/failures` has each as it was seen, with its source.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from autotune.events import Outcome

# Besides `torch.OutOfMemoryError` and `MemoryError`: handles of cuBLAS and cuDNN, the driver, Triton's shared memory,
# the allocators of torch, C++ and Rust on the host, and vLLM where nothing is left for its cache.
OUT_OF_MEMORY = (
    "out of memory",
    "_STATUS_ALLOC_FAILED",
    "_ALLOCATION_FAILED",
    "OutOfResources",
    "can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "Cannot allocate memory",
    "std::bad_alloc",
    "memory allocation of ",
    "No available memory for the cache blocks",
    "larger than the available KV cache memory",
    "tokens that can be stored in KV cache",
    "on startup is less than desired GPU memory utilization",
)
# NCCL waits for another rank; torch ends the process once its own deadline is over
HUNG = ("Watchdog caught collective operation timeout",)
# A process below the trial was ended from outside, as the kernel does that needs memory
KILLED = ("is killed by signal: Killed", "Signals.SIGKILL")
OUT_OF_MEMORY_TYPES = ("OutOfMemoryError", "MemoryError", "ArrowMemoryError", "OutOfResources")

TRACEBACK = "Traceback (most recent call last):"
IGNORED = "Exception ignored in"  # at a process's end, and no cause of it
NATIVE = ("terminate called", "memory allocation of ", "Watchdog caught ")  # errors without a traceback
# what loggers and launchers put before a line: vLLM's process and time, a rank of torchrun
PREFIX = re.compile(
    r"^(?:\(\w[^()]*pid=\d+[^()]*\) ?)?"
    r"(?:(?:ERROR|WARNING|INFO) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?"
    r"(?:\[rank\d+\]: ?)?"
)
NAMED = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|OutOfResources|Exit)\b")
MESSAGE_LINES = 6  # of an error, its first line among them
LONGEST = 40  # lines of a traceback that are shown


def outcome_of_error(error: BaseException) -> Outcome:
    """The outcome that an exception means, by its type and words."""
    if isinstance(error, MemoryError) or any(kind.__name__ in OUT_OF_MEMORY_TYPES for kind in type(error).__mro__):
        return "oom"
    return outcome_of_words(str(error))


def outcome_of_words(text: str) -> Outcome:
    """The outcome that an error's message means; `error` where it is none of the known ones."""
    known: tuple[tuple[Outcome, Sequence[str]], ...] = (("hung", HUNG), ("killed", KILLED), ("oom", OUT_OF_MEMORY))
    return next((outcome for outcome, words in known if any(one in text for one in words)), "error")


def read_log(text: str) -> tuple[Outcome, str] | None:
    """Outcome and first line of the error that a log tells of: the first of a known kind, or else the first at all;
    None where there is none.

    The first, since others follow from it: a launcher's that its process ended, an engine's that its core did.
    """
    errors = [(_outcome_of_message(message), message) for message in _messages(text)]
    known = next((one for one in errors if one[0] != "error"), None)
    if known is None and not errors:
        return None
    outcome, message = known or errors[0]
    return outcome, message[0].strip()


def first_traceback(text: str, *, of: str | None = None) -> str | None:
    """The traceback in a log that shows the cause: the first, or the first that ends in the error `of` where one does.
    Its middle is left out where it is long."""
    blocks = list(_tracebacks([PREFIX.sub("", line) for line in text.splitlines()]))
    if not blocks:
        return None
    wanted = None if of is None else of.split(": ", 1)[-1].strip()
    named = [block for block in blocks if wanted and any(wanted in line for line in block[-MESSAGE_LINES:])]
    block = (named or blocks)[0]
    if len(block) > LONGEST:
        left_out = len(block) - LONGEST + 1
        block = [*block[:4], f"  ... {left_out} lines ...", *block[4 + left_out :]]
    return "\n".join(block)


def _outcome_of_message(message: list[str]) -> Outcome:
    kind = message[0].split(":", 1)[0].rsplit(".", 1)[-1]
    return "oom" if kind in OUT_OF_MEMORY_TYPES else outcome_of_words("\n".join(message))


def _messages(text: str) -> Iterator[list[str]]:
    """The lines of each error's message, in the order of the log."""
    lines = [PREFIX.sub("", line) for line in text.splitlines()]
    inside = ignored = False
    for number, line in enumerate(lines):
        if line.startswith(TRACEBACK):
            inside = True
            ignored = number > 0 and lines[number - 1].startswith(IGNORED)
        elif inside and line.strip() and not line.startswith((" ", "\t")):
            inside = False
            if not ignored:
                yield list(_message(lines[number:]))
        elif not inside and (any(words in line for words in NATIVE) or NAMED.match(line)):
            yield list(_message(lines[number:]))


def _message(lines: list[str]) -> Iterator[str]:
    for number, line in enumerate(lines[:MESSAGE_LINES]):
        if number and (not line.strip() or line.startswith(TRACEBACK)):
            return
        yield line


def _tracebacks(lines: list[str]) -> Iterator[list[str]]:
    """Each traceback with its error's message."""
    start: int | None = None
    for number, line in enumerate(lines):
        if line.startswith(TRACEBACK):
            start = number
        elif start is not None and line.strip() and not line.startswith((" ", "\t")):
            if start == 0 or not lines[start - 1].startswith(IGNORED):
                yield [*lines[start:number], *_message(lines[number:])]
            start = None
