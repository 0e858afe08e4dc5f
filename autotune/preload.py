"""What the fork server imports before it forks: TRL and all it stands on.

Loaded by name through `multiprocessing`'s `set_forkserver_preload`, never by the engine. Importing this takes about
5 s in a fresh process; a child forked afterwards has it in 15 ms. Nothing here touches CUDA: a process that has
initialised CUDA cannot hand it to forked children.
"""

import importlib
import traceback

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
