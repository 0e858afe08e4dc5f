"""Measuring token lengths, beside TRL's own preparation of the same conversations on the same cores.

    make bench-lengths                       100,000 conversations, of which TRL prepares 20,000; then a million rows
    make bench-lengths ARGS="--rows 5000 --trl-rows 2000 --memory-rows 20000"

Rates are rows a second from the file to the lengths: reading it, loading the tokenizer and, in ours, comparing with
TRL on 400 rows. TRL runs once as it is and once with a process for each core. Every side is a process of its own, its
libraries loaded before the clock starts; memory is the most that one process held, libraries and mapped files included.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from autotune import demo_text
from autotune.children import CHILD_ENVIRONMENT, Children
from autotune.demo import build_demo, cache_folder

TOKENS_A_WORD = 1.28  # of the demo's tokenizer, punctuation included
MEMORY_TOKENS = 300
LEAST_RATIO = 3.0
MOST_BYTES = 2**30


def main() -> None:
    """Print the rates, their ratios and the memory; exit 1 below 3x TRL as it is, or above 1 GiB."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--trl-rows", type=int, default=20_000, help="rows that TRL prepares")
    parser.add_argument("--memory-rows", type=int, default=1_000_000, help="rows of 300 tokens; 0 for none")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side is not None:
        print(json.dumps(side(json.loads(given.side))))
        return
    with tempfile.TemporaryDirectory(prefix="trl-autotune-bench-") as name:
        folder = Path(name)
        model = demo_model(folder)
        passed = compare_speed(folder, model, rows=given.rows, trl_rows=min(given.trl_rows, given.rows))
        if given.memory_rows:
            passed &= check_memory(folder, model, rows=given.memory_rows)
    sys.exit(0 if passed else 1)


def compare_speed(folder: Path, model: Path, *, rows: int, trl_rows: int) -> bool:
    """Rows a second of both, and whether ours is fast enough."""
    cores = len(os.sched_getaffinity(0))
    ours_file = write_conversations(folder / "all.jsonl", rows)
    trl_file = write_conversations(folder / "share.jsonl", trl_rows)
    alone = measured(model, trl_file, by="trl", processes=None)
    ours = measured(model, ours_file, by="ours")
    spread = measured(model, trl_file, by="trl", processes=cores) if cores > 1 else alone
    check = measured(model, trl_file, by="ours")
    if check["tokens"] != alone["tokens"]:
        raise SystemExit(f"ours counts {check['tokens']:,} tokens in TRL's share, and TRL {alone['tokens']:,}")
    print(f"conversations of {ours['tokens'] / rows:.0f} tokens on the average, {cores} cores")
    tell("TRL as it is", alone, trl_rows)
    tell(f"TRL, {cores} processes", spread, trl_rows)
    tell(f"ours ({ours['way']})", ours, rows)
    rate = rows / ours["seconds"]
    ratios: list[float] = [rate * each["seconds"] / trl_rows for each in (alone, spread)]
    print(f"ratio             {ratios[0]:.1f}x TRL as it is, {ratios[1]:.1f}x TRL with a process for each core")
    work = alone["cpu_seconds"] / trl_rows / (ours["cpu_seconds"] / rows)
    print(f"work of a row     {work:.1f}x in TRL, in seconds of cores, which other processes disturb less")
    return ratios[0] >= LEAST_RATIO


def check_memory(folder: Path, model: Path, *, rows: int) -> bool:
    """The most memory at all of so many rows of 300 tokens, and whether it stays below 1 GiB."""
    path = write_texts(folder / "many.jsonl", rows)
    found = measured(model, path, by="ours")
    print(f"{rows:,} rows of {found['tokens'] / rows:.0f} tokens, {path.stat().st_size / 2**30:.2f} GiB of JSON")
    tell("ours", found, rows)
    return bool(found["peak_bytes"] < MOST_BYTES)


def tell(name: str, found: dict[str, Any], rows: int) -> None:
    """One line of the table."""
    print(
        f"{name:<22}{rows:>9,} rows {found['seconds']:>8.1f} s {rows / found['seconds']:>9,.0f} rows/s "
        f"{found['cpu_seconds']:>7.1f} s of cores "
        f"{found['peak_bytes'] / 2**20:>7,.0f} MiB at most"
    )


def measured(model: Path, data: Path, *, by: str, processes: int | None = None) -> dict[str, Any]:
    """What one side took, in a process of its own."""
    request = {"model": str(model), "data": str(data), "by": by, "processes": processes}
    done = subprocess.run(
        [sys.executable, __file__, "--side", json.dumps(request)],
        env={**os.environ, **CHILD_ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def side(request: dict[str, Any]) -> dict[str, Any]:
    """Seconds, tokens and the most memory of one side. Runs in its own process."""
    import datasets
    import transformers
    import trl

    from autotune.probe import lengths_file, measuring

    for part in (trl.SFTTrainer, transformers.AutoProcessor, datasets.Dataset):  # imported when first asked for
        assert part is not None
    job = {
        "model_name_or_path": request["model"],
        "datasets": [{"path": "json", "data_files": request["data"]}],
        "dataset_num_proc": request["processes"],
    }
    with tempfile.TemporaryDirectory(prefix="trl-autotune-bench-") as name:
        started, cpu_started = time.perf_counter(), cpu()
        if request["by"] == "trl":
            tokens, way = prepared_by_trl(job, Path(name)), "TRL"
        else:
            asked = {"job": job, "method": "sft", "all_rows": True, "cache": None}
            measuring.measure(asked, Path(name))
            facts, counts = lengths_file.read(Path(name, lengths_file.NAME))
            tokens, way = sum(counts["tokens"]), facts["by"]
        seconds = time.perf_counter() - started
        cpu_seconds = cpu() - cpu_started
    uses = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    peak = max(use.ru_maxrss for use in uses) * 1024
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "tokens": tokens, "way": way, "peak_bytes": peak}


def cpu() -> float:
    """Seconds of all cores that this process and those it waited for took."""
    uses = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in uses)


def prepared_by_trl(job: dict[str, Any], scratch: Path) -> int:
    """Prepare the rows as `SFTTrainer` does, without truncation; how many tokens there are."""
    from types import SimpleNamespace

    import trl

    from autotune.probe import tokenizer, training_data

    loaded = tokenizer.load(job)
    data, _ = training_data.load(job, scratch)
    trainer = SimpleNamespace(_tokenizer=loaded.inner, chat_template=None, completion_only_loss=False)
    arguments = SimpleNamespace(
        dataset_num_proc=job["dataset_num_proc"],
        dataset_text_field="text",
        assistant_only_loss=False,
        max_length=None,
        shuffle_dataset=False,
    )
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as `trl` leaves it once processes are forked
    rows = trl.SFTTrainer._prepare_dataset(trainer, data, loaded.processing_class, arguments, False, None, "train")
    table = rows.select_columns(["input_ids"]).with_format("arrow")
    starts = range(0, len(rows), 1000)
    return sum(table[start : start + 1000]["input_ids"].combine_chunks().flatten().__len__() for start in starts)


def demo_model(folder: Path) -> Path:
    """The demo's model and tokenizer."""
    with Children(dict(os.environ), log=folder / "server.log") as children:
        return build_demo(cache_folder(), children, accelerator=False).model


def write_conversations(path: Path, rows: int) -> Path:
    """Conversations of the demo's kind, as many as asked for; each is another mixture of its answers."""
    known = demo_text.conversations()
    chance = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for each in itertools.islice(itertools.cycle(known), rows):
            messages = [
                {"role": message.role, "content": shuffled(message.content, chance)} for message in each.messages
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def write_texts(path: Path, rows: int) -> Path:
    """Texts of 300 tokens."""
    answers = [message.content for each in demo_text.conversations() for message in each.messages]
    words = " ".join(answers).split()
    count = round(MEMORY_TOKENS / TOKENS_A_WORD)
    chance = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(rows):
            start = chance.randrange(len(words) - count)
            file.write(json.dumps({"text": " ".join(words[start : start + count])}) + "\n")
    return path


def shuffled(text: str, chance: random.Random) -> str:
    """The sentences of a text in another order."""
    sentences = text.split(". ")
    chance.shuffle(sentences)
    return ". ".join(sentences)


if __name__ == "__main__":
    main()
