"""What the fork server imports before it forks: TRL and all it stands on.

Loaded by name through `multiprocessing`'s `set_forkserver_preload`, never by the engine. Importing this takes about
5 s in a fresh process; a child forked afterwards has it in 15 ms. Nothing here touches CUDA: a process that has
initialised CUDA cannot hand it to forked children.
"""

import atexit
import importlib
import os
import shutil
import sys
import traceback

from autotune.children import SOCKET_FOLDER

MODULES = (
    "torch",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "datasets",
    "peft",
    "accelerate.commands.launch",
    "trl",
    "trl.trainer.sft_trainer",
    "trl.scripts.sft",
    "yaml",
    "psutil",
)

for _name in MODULES:
    try:
        importlib.import_module(_name)
    except Exception:  # a child that needs it will say what is missing, with a traceback in its own log
        traceback.print_exc()


def _end(folder: str, engine_pid: int) -> None:
    """End at once: taking down all that was imported takes a second, and nothing of it is needed.

    `multiprocessing` removes its socket when the engine ends by itself; one that was killed cannot.
    """
    if os.getppid() != engine_pid:
        shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if SOCKET_FOLDER in os.environ:
    atexit.register(_end, os.environ.pop(SOCKET_FOLDER), os.getppid())
