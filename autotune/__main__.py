"""`python -m autotune` is `trl-autotune`."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the working folder, where a user's `datasets.py` would be taken for the library
    from autotune.cli import main

    sys.exit(main())
