"""What a trial really does: TRL's own parser and `main`, timed. The only code that trains.

Runs in a child. It imports nothing of this project but the events, the words of failures and how a kernel's revision
is found, so that what is timed is TRL and not the tuner.
The trainer is TRL's own, with a callback that writes a line a step and stops the training; nothing is saved.
"""

from __future__ import annotations

import importlib
import math
import os
import resource
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autotune.events import PROTOCOL, EventWriter, Finished, Hello, Outcome, PassEnd, Phase, Step
from autotune.kernel_revision import kernel_revision
from autotune.trial.failures import outcome_of_error

TURN_POLL_SECONDS = 0.1  # a trial that waits must not be felt by the one that runs

TRAINERS = {"sft": "SFTTrainer"}


class TrialOver(BaseException):
    """Raised by the callback to leave TRL's `main` without saving. Not an Exception: nothing may swallow it."""


def run(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run one trial. `request`: method, config (path of the trial's YAML), threads, datasets_cache, started
    (`time.monotonic` of the start), warm_up_steps, passes (0: stop after the warm-up), turns (wait for `turns` before
    each pass)."""
    events = EventWriter(folder / "events.jsonl")
    try:
        outcome, where, detail = _train(request, folder, events), None, None
    except TrialOver as over:
        outcome, where, detail = over.args[0], None, None
    except BaseException as error:
        traceback.print_exc()
        outcome, where, detail = classify(error)
    events.write(Finished(outcome=outcome, where=where, detail=detail, peak_bytes=peak_bytes()))
    return {"outcome": outcome}


def _train(request: dict[str, Any], folder: Path, events: EventWriter) -> Outcome:
    def enter(phase: Any) -> None:
        events.write(Phase(phase=phase, seconds=time.monotonic() - request["started"]))

    enter("start")
    preloaded = "trl.trainer.sft_trainer" in sys.modules
    import datasets.config
    import torch
    import trl

    if request["threads"] is not None:
        # `accelerate launch` gives a process its threads through OMP_NUM_THREADS, which torch read at import
        torch.set_num_threads(request["threads"])
    # datasets reads HF_DATASETS_CACHE at import; the trials' tokenised sample belongs in the run's own folder
    datasets.config.HF_DATASETS_CACHE = Path(request["datasets_cache"])
    _keep_temporary_files_in(request["datasets_cache"])
    script = importlib.import_module(f"trl.scripts.{request['method']}")
    # what `trl`'s launcher consumes is left in the YAML, as it is in the delivered one, and ignored by the script
    *arguments, _launcher_options = script.make_parser().parse_args_and_config(
        ["--config", request["config"]], return_remaining_strings=True
    )
    name = TRAINERS[request["method"]]
    setattr(trl, name, timed(getattr(trl, name), request, folder, events, enter, preloaded=preloaded))
    enter("load_model")
    script.main(*arguments)
    return "ok"


def _keep_temporary_files_in(folder: str) -> None:
    """The folder of `datasets` for rows without a cache file is deleted in an exit handler, which a trial never comes
    to; it is made here, where TMPDIR says (datasets 5.2, `fingerprint.py`)."""
    from datasets.fingerprint import get_temporary_cache_files_directory

    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = folder
    try:
        get_temporary_cache_files_directory()
    finally:
        os.environ.pop("TMPDIR")
        if before is not None:
            os.environ["TMPDIR"] = before


def timed(
    trainer_class: Any, request: dict[str, Any], folder: Path, events: EventWriter, enter: Any, *, preloaded: bool
) -> Any:
    """A subclass of a TRL trainer that reports what happens and stops when the trial is over."""
    import torch
    import transformers

    def synchronise() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    class TimedTrainer(trainer_class):  # type: ignore[misc]
        def __init__(self, *positional: Any, **named: Any) -> None:
            super().__init__(*positional, **named)
            init_kwargs = self.args.model_init_kwargs or {}
            attention = getattr(self.model.config, "_attn_implementation", None)
            events.write(
                Hello(
                    protocol=PROTOCOL,
                    pid=os.getpid(),
                    versions=_versions(),
                    requested_attention=init_kwargs.get("attn_implementation"),
                    actual_attention=attention,
                    kernel_revision=kernel_revision(attention),
                    preloaded=preloaded,
                )
            )
            self.add_callback(Stopwatch(self))
            self.losses: list[Any] = []
            self.grad_norm: Any = None
            self.positions = 0
            self.micro_batches = 0

        def _prepare_dataset(self, *positional: Any, **named: Any) -> Any:
            enter("prepare_data")
            return super()._prepare_dataset(*positional, **named)

        def training_step(self, model: Any, inputs: Any, *positional: Any, **named: Any) -> Any:
            self.positions += inputs["input_ids"].numel()
            self.micro_batches += 1
            loss = super().training_step(model, inputs, *positional, **named)
            self.losses.append(loss.detach())
            return loss

        def _get_grad_norm(self, *positional: Any, **named: Any) -> Any:
            # a log tells it too, but after the step's end and not for every step
            self.grad_norm = super()._get_grad_norm(*positional, **named)
            return self.grad_norm

    class Stopwatch(transformers.TrainerCallback):  # type: ignore[misc]
        """Times each optimizer step from the end of the one before, so that waiting for data counts."""

        def __init__(self, trainer: Any) -> None:
            self.trainer = trainer
            self.pass_index = -1
            self.step = 0
            self.last_end = 0.0
            self.tokens = 0

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            enter("first_step")

        def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.pass_index += 1
            self.step = 0
            if self.pass_index == 1:
                enter("measure")
            if self.pass_index > 0:
                self.wait_for_turn()
            self.last_end = time.perf_counter()

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            # Starting dataloader workers costs a real training run one moment an epoch; a pass of a few steps must
            # not be charged for it. Without workers the first batch is fetched as any other and counts.
            if self.step == 0 and args.dataloader_num_workers > 0:
                self.last_end = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            synchronise()
            now = time.perf_counter()
            trainer = self.trainer
            loss = float(torch.stack(trainer.losses).sum())
            grad_norm = None if trainer.grad_norm is None else float(trainer.grad_norm)
            useful = trainer._total_train_tokens - self.tokens  # TRL's own `num_tokens`, without waiting for a log
            events.write(
                Step(
                    pass_index=self.pass_index,
                    step=self.step,
                    seconds=now - self.last_end,
                    micro_batches=trainer.micro_batches,
                    useful_tokens=useful,
                    padding_tokens=trainer.positions - useful,
                    loss=loss,
                    grad_norm=grad_norm,
                    peak_bytes=peak_bytes(),
                    finite=math.isfinite(loss) and (grad_norm is None or math.isfinite(grad_norm)),
                )
            )
            self.tokens += useful
            trainer.positions = trainer.micro_batches = 0
            trainer.losses.clear()
            trainer.grad_norm = None
            self.step += 1
            if (folder / "stop").exists():
                raise TrialOver("stopped")
            if self.pass_index == 0 and self.step >= request["warm_up_steps"]:
                if request["passes"] == 0:
                    raise TrialOver("ok")
                control.should_epoch_stop = True
            self.last_end = time.perf_counter()

        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.pass_index > 0:
                events.write(PassEnd(pass_index=self.pass_index))
                if self.pass_index >= request["passes"]:
                    raise TrialOver("ok")

        def wait_for_turn(self) -> None:
            """Interleaved trials take turns: pass N starts when the engine has written N or more into `turns`."""
            while request["turns"]:
                if (folder / "stop").exists():
                    raise TrialOver("stopped")
                try:
                    if int((folder / "turns").read_text() or 0) >= self.pass_index:
                        return
                except FileNotFoundError:
                    pass
                time.sleep(TURN_POLL_SECONDS)

    TimedTrainer.__name__ = trainer_class.__name__  # TRL names its tags and messages after the class
    return TimedTrainer


def classify(error: BaseException) -> tuple[Outcome, str | None, str]:
    """Outcome, where it happened, and the first line of what was said; of the memory that ran out, where an error
    was raised because of that."""
    told = next((one for one in _with_causes(error) if outcome_of_error(one) != "error"), None)
    said = (str(told or error).strip().splitlines() or [""])[0]
    detail = f"{type(told or error).__name__}: {said}"[:500]
    frames = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    where = next(
        (
            place
            for name, place in (
                ("backward", "backward"),
                ("compute_loss", "forward"),
                ("_prepare_dataset", "prepare_data"),
                ("create_model_from_path", "load_model"),
                ("step", "optimizer step"),
            )
            if name in frames
        ),
        None,
    )
    return outcome_of_error(told or error), where, detail


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, what it was raised from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ if error.__suppress_context__ else error.__context__


def peak_bytes() -> int:
    """The most memory this process has held: reserved by torch on a GPU, resident on a CPU. Bytes."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_reserved())
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): kilobytes on Linux, bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _versions() -> dict[str, str | None]:
    import accelerate
    import torch
    import transformers
    import trl

    return {
        "trl": trl.__version__,
        "transformers": transformers.__version__,
        "torch": str(torch.__version__),
        "accelerate": accelerate.__version__,
    }
