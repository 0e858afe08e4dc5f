"""Every shape of data of every method, row by row against what TRL's own trainers make of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import transformers
import trl

from autotune.children import Children
from autotune.errors import AutotuneError
from autotune.probe.formats import Method
from autotune.probe.lengths import Lengths, dropped_places, measure_lengths
from tests import tiny
from tests.trl_rows import by_the_trainer, check_against_the_trainer, job_of

REAL_DATA = Path(__file__).parents[2] / "shared" / "data" / "gsm8k-test.jsonl"
MAX_LENGTH = 64
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"place": {"type": "string"}}}}
Rows = list[dict[str, Any]]

# Puts what `chat_template_kwargs` says before each answer, and renders a prompt alone otherwise than with its answer
TRICKY_TEMPLATE = tiny.CHAT_TEMPLATE.replace(
    "{{- '<|im_start|>assistant\\n' }}{%- endif %}", "{{- '<|im_start|>assistant\\nba ko li mu' }}{%- endif %}"
).replace("{%- for message in messages %}", "{{- 'ta ' * (times or 0) }}{%- for message in messages %}", 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True, scope="module")
def quiet_datasets() -> Iterator[None]:
    datasets.disable_caching()
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()
    datasets.enable_caching()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def ids_of(*lengths: int) -> Rows:
    return [{"input_ids": list(range(5, 5 + length))} for length in lengths]


def heavy_tail() -> Rows:
    return [{"text": tiny.words(count, seed=count)} for count in tiny.lengths(300, median=30, longest=900)]


def systems() -> Rows:
    chats = [[user("ba"), assistant("ko " * number)] for number in range(1, 50)]
    system = {"role": "system", "content": "li mu"}
    return [{"messages": [system, *chat] if number % 2 else chat} for number, chat in enumerate(chats)]


def with_tools() -> Rows:
    kinds: list[Any] = [None, [TOOL], [TOOL, TOOL]]
    chats = [[user("ba ko"), assistant("ko" * number)] for number in range(1, 40)]
    return [{"messages": chat, "tools": kinds[number % 3]} for number, chat in enumerate(chats)]


def tools_as_text() -> Rows:
    return [{**row, "tools": json.dumps(row["tools"]) if row["tools"] else None} for row in with_tools()]


def template_options() -> Rows:
    return [
        {
            "prompt": [user("ba " * number)],
            "completion": [assistant("ko")],
            "chat_template_kwargs": {"times": number % 4},
        }
        for number in range(1, 40)
    ]


def merging_prompts() -> Rows:
    """Prompts that end within a word, so that tokens merge across the border."""
    return [
        {"prompt": tiny.words(9, seed=number)[:-1], "completion": "ri" * (number % 5) + "s"} for number in range(60)
    ]


def text_and_completion() -> Rows:
    return [
        {"text": "ba" + (tiny.END if number % 2 else ""), "completion": "ko", "prompt": "li "} for number in range(9)
    ]


def masked() -> Rows:
    rows = ids_of(*range(1, 40))
    for row in rows:
        count = len(row["input_ids"])
        row["completion_mask"] = [0] * (count // 2) + [1] * (count - count // 2)
        row["assistant_masks"] = [place % 2 for place in range(count)]
    return rows


def real_rows() -> Rows:
    rows = [json.loads(line) for line in REAL_DATA.read_text(encoding="utf-8").splitlines()]
    return [{"prompt": row["question"], "completion": row["answer"]} for row in rows]


SHAPES: dict[str, tuple[Callable[[], Rows], dict[str, Any]]] = {
    "a heavy tail": (heavy_tail, {}),
    "all longer than max_length": (lambda: [{"text": tiny.words(99, seed=seed)} for seed in range(30)], {}),
    "all of one length": (lambda: [{"text": "ba ko li"}] * 50, {}),
    "lengths 1, max_length and one more": (lambda: ids_of(1, MAX_LENGTH, MAX_LENGTH + 1, 1), {}),
    "a row without tokens": (lambda: ids_of(3, 0, 2), {}),
    "empty texts": (lambda: [{"text": text} for text in ("", "ba", "", " ")], {}),
    "one row": (lambda: [{"text": "ba"}], {}),
    "texts that end already": (lambda: [{"text": f"ba{tiny.END}"}, {"text": "ko"}, {"text": tiny.END}], {}),
    "system messages": (systems, {}),
    "system messages, answers alone": (systems, {"assistant_only_loss": True}),
    "tools": (with_tools, {}),
    "tools, answers alone": (with_tools, {"assistant_only_loss": True}),
    "tools as text": (tools_as_text, {}),
    "options of the template": (template_options, {"chat_template_path": "tricky.jinja"}),
    "options of the template, answers alone": (
        template_options,
        {"chat_template_path": "tricky.jinja", "assistant_only_loss": True},
    ),
    "prompts that merge into their completion": (merging_prompts, {}),
    "prompts that merge, whole rows": (merging_prompts, {"completion_only_loss": False}),
    "a text beside a completion": (text_and_completion, {}),
    "empty completions": (lambda: [{"prompt": "ba ", "completion": ""}, {"prompt": "", "completion": "ko"}], {}),
    "tokens with masks": (masked, {}),
    "tokens with masks of completions": (masked, {"completion_only_loss": True}),
    "tokens with labels": (lambda: [{"input_ids": [5, 6, 7], "labels": [-100, 6, -100]}] * 3, {}),
    "letters of many scripts": (lambda: [{"text": "naïve 漢字 🙂 \u0301"}, {"text": "\x00\n\r\t"}], {}),
    "null fields": (lambda: [{"messages": [{**user("ba"), "name": None}, assistant("ko")], "note": None}] * 9, {}),
    "real rows": (real_rows, {}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_batches_give_row_by_row_what_trl_gives(shape: str, children: Children, model: Path, tmp_path: Path) -> None:
    make, options = SHAPES[shape]
    if shape == "real rows" and not REAL_DATA.exists():
        pytest.skip("the real rows are not here")
    (tmp_path / "tricky.jinja").write_text(TRICKY_TEMPLATE, encoding="utf-8")
    options = {
        name: str(tmp_path / value) if name == "chat_template_path" else value for name, value in options.items()
    }
    job = job_of(model, make(), tmp_path, **options)
    lengths = measure_lengths(job, folder=tmp_path, children=children)
    assert lengths.by == "batched", lengths.by_reason
    check_against_the_trainer(lengths, by_the_trainer(job, tmp_path))


def test_the_order_of_rows_and_batches_is_kept_in_many_rows(children: Children, model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "ba " * (number % 7 + 1), "completion": "ko" * (number % 11)} for number in range(2500)]
    job = job_of(model, rows, tmp_path)
    lengths = measure_lengths(job, folder=tmp_path, children=children)
    assert lengths.by == "batched"
    check_against_the_trainer(lengths, by_the_trainer(job, tmp_path))


@pytest.mark.parametrize("shape", ["a heavy tail", "system messages", "prompts that merge into their completion"])
def test_tokens_that_begin_plain_text_are_counted(shape: str, children: Children, tmp_path: Path) -> None:
    model = tiny.make_model(tmp_path / "begins")
    path = model / "tokenizer.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    begin = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    written["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    path.write_text(json.dumps(written), encoding="utf-8")
    job = job_of(model, SHAPES[shape][0](), tmp_path)
    lengths = measure_lengths(job, folder=tmp_path, children=children)
    assert lengths.by == "batched", lengths.by_reason
    check_against_the_trainer(lengths, by_the_trainer(job, tmp_path))


@pytest.mark.parametrize("shape", ["system messages", "tools"])
@pytest.mark.parametrize("template", ["qwen3", "qwen2_5", "llama3"])
def test_the_template_that_trl_trains_with_is_used(
    shape: str, template: str, children: Children, tmp_path: Path
) -> None:
    """For these TRL has one that marks the answers, and puts it in the place of the model's own."""
    model = tiny.make_model(tmp_path / "model")
    known = Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja"
    shutil.copy(known, model / "chat_template.jinja")
    job = job_of(model, SHAPES[shape][0](), tmp_path, assistant_only_loss=True)
    lengths = measure_lengths(job, folder=tmp_path, children=children)
    assert lengths.by == "batched", lengths.by_reason
    assert all(0 < loss < tokens for loss, tokens in zip(lengths.loss_tokens, lengths.tokens, strict=True))
    check_against_the_trainer(lengths, by_the_trainer(job, tmp_path))


# ---- where TRL's own preparation is used


def test_a_slow_tokenizer_is_left_to_trl(children: Children, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "slow"
    shutil.copytree(model, folder, ignore=lambda _, names: [name for name in names if "token" in name])
    transformers.ByT5Tokenizer().save_pretrained(folder)
    lengths = measure_lengths(
        job_of(folder, [{"text": "ba"}, {"text": "漢"}], tmp_path), folder=tmp_path, children=children
    )
    assert (lengths.by, lengths.by_reason) == ("TRL", "a slow tokenizer")
    assert lengths.tokens == (2 + 1, 3 + 1)  # a token for each byte and the one that ends every text


def test_prepared_rows_are_counted_as_they_are(children: Children, model: Path, tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6], "labels": [-100, 6]}]
    job = job_of(model, rows, tmp_path, dataset_kwargs={"skip_prepare_dataset": True})
    lengths = measure_lengths(job, folder=tmp_path, children=children)
    assert (lengths.by, lengths.tokens, lengths.loss_tokens) == ("TRL", (2,), (1,))
    assert "skip_prepare_dataset" in lengths.by_reason


def test_text_with_labels_is_left_to_trl(children: Children, model: Path, tmp_path: Path) -> None:
    rows = [{"text": "ba ko", "labels": [1, 2]}] * 3
    lengths = measure_lengths(job_of(model, rows, tmp_path), folder=tmp_path, children=children)
    assert lengths.by == "TRL"
    assert lengths.by_reason == "labels or masks without `input_ids`"
    assert lengths.tokens == (3, 3, 3)


def test_template_options_about_tokens_are_left_to_trl(children: Children, model: Path, tmp_path: Path) -> None:
    rows = [
        {"messages": [user("ba"), assistant("ko " * 50)], "chat_template_kwargs": {"truncation": True, "max_length": 9}}
    ]
    job = job_of(model, rows, tmp_path)
    lengths = measure_lengths(job, folder=tmp_path, children=children)
    assert (lengths.by, lengths.tokens) == ("TRL", (9,))


def test_rows_in_the_middle_that_only_trl_prepares_are_left_to_it(
    children: Children, model: Path, tmp_path: Path
) -> None:
    rows: Rows = [{"messages": [user("ba"), assistant("ko")], "chat_template_kwargs": {}} for _ in range(700)]
    rows[300]["chat_template_kwargs"] = {"padding": "longest"}
    (tmp_path / "fixed.jinja").write_text("ba ko", encoding="utf-8")
    job = job_of(model, rows, tmp_path, chat_template_path=str(tmp_path / "fixed.jinja"))
    lengths = measure_lengths(job, folder=tmp_path, children=children)
    assert lengths.by == "TRL"
    assert set(lengths.tokens) == {2}


# ---- preferences


def pairs() -> Rows:
    return [
        {
            "prompt": tiny.words(number % 40 + 1, seed=number),
            "chosen": " " + tiny.words(number % 13 + 1, seed=number + 1),
            "rejected": tiny.words(number % 90 + 1, seed=number + 2),
        }
        for number in range(80)
    ]


def chat_pairs() -> Rows:
    return [
        {
            "prompt": [user(row["prompt"])],
            "chosen": [assistant(row["chosen"])],
            "rejected": [assistant(row["rejected"])],
        }
        for row in pairs()
    ]


def implicit_pairs() -> Rows:
    return [
        {"chosen": f"{row['prompt']} ko{row['chosen']}", "rejected": f"{row['prompt']} li{row['rejected']}"}
        for row in pairs()
    ]


def implicit_chat_pairs() -> Rows:
    return [
        {"chosen": row["prompt"] + row["chosen"], "rejected": row["prompt"] + row["rejected"]} for row in chat_pairs()
    ]


def labelled() -> Rows:
    return [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": number % 3 > 0}
        for number, row in enumerate(pairs())
    ]


def labelled_chats() -> Rows:
    return [
        {**row, "prompt": [user(row["prompt"])], "completion": [assistant(row["completion"])]} for row in labelled()
    ]


PAIRS = {"pairs": pairs, "chats": chat_pairs, "implicit": implicit_pairs, "implicit chats": implicit_chat_pairs}


def prepared_by(method: Method, model: Path, folder: Path, max_length: int | None) -> dict[str, list[Any]]:
    data = datasets.load_dataset(
        "json", data_files=str(folder / "rows.jsonl"), split="train", cache_dir=str(folder / "cache")
    )
    kind, config = {
        "dpo": (trl.DPOTrainer, trl.DPOConfig),
        "kto": (trl.KTOTrainer, trl.KTOConfig),
        "reward": (trl.RewardTrainer, trl.RewardConfig),
    }[method]
    arguments = config(
        output_dir=str(folder / "out"), max_length=max_length, use_cpu=True, bf16=False, report_to="none"
    )
    columns: dict[str, list[Any]] = kind(model=str(model), args=arguments, train_dataset=data).train_dataset[:]
    return columns


def measured(rows: Rows, method: Method, children: Children, model: Path, folder: Path) -> Lengths:
    lengths = measure_lengths(job_of(model, rows, folder), folder=folder, children=children, method=method)
    assert lengths.method == method
    assert lengths.by == "batched", lengths.by_reason
    return lengths


def sizes(columns: dict[str, list[Any]], name: str) -> tuple[int, ...]:
    return tuple(len(ids) for ids in columns[name])


def without(values: tuple[int, ...], dropped: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(value for place, value in enumerate(values) if place not in set(dropped))


@pytest.mark.parametrize("kind", PAIRS)
def test_pairs_are_measured_and_dropped_as_dpo_does(kind: str, children: Children, model: Path, tmp_path: Path) -> None:
    lengths = measured(PAIRS[kind](), "dpo", children, model, tmp_path)
    columns = prepared_by("dpo", model, tmp_path, None)
    assert lengths.prompt_tokens == sizes(columns, "prompt_ids")
    assert lengths.chosen_tokens == sizes(columns, "chosen_ids")
    assert lengths.rejected_tokens == sizes(columns, "rejected_ids")
    parts = zip(lengths.prompt_tokens, lengths.chosen_tokens, lengths.rejected_tokens, strict=True)
    assert lengths.tokens == tuple(2 * prompt + chosen + rejected for prompt, chosen, rejected in parts)
    dropped = dropped_places(lengths, 30)
    assert dropped
    assert without(lengths.prompt_tokens, dropped) == sizes(prepared_by("dpo", model, tmp_path, 30), "prompt_ids")
    assert dropped_places(lengths, 30, "keep_end") == dropped_places(lengths, None) == ()


@pytest.mark.parametrize("kind", PAIRS)
def test_pairs_are_measured_and_dropped_as_the_reward_trainer_does(
    kind: str, children: Children, model: Path, tmp_path: Path
) -> None:
    lengths = measured(PAIRS[kind](), "reward", children, model, tmp_path)
    columns = prepared_by("reward", model, tmp_path, None)
    assert lengths.chosen_tokens == sizes(columns, "chosen_ids")
    assert lengths.rejected_tokens == sizes(columns, "rejected_ids")
    dropped = dropped_places(lengths, 60)
    assert dropped
    assert without(lengths.chosen_tokens, dropped) == sizes(prepared_by("reward", model, tmp_path, 60), "chosen_ids")


@pytest.mark.parametrize("kind", ["pairs", "implicit chats", "labelled", "labelled chats"])
def test_examples_are_measured_and_dropped_as_kto_does(
    kind: str, children: Children, model: Path, tmp_path: Path
) -> None:
    rows = {**PAIRS, "labelled": labelled, "labelled chats": labelled_chats}[kind]()
    lengths = measured(rows, "kto", children, model, tmp_path)
    columns = prepared_by("kto", model, tmp_path, None)
    assert lengths.rows == len(columns["label"]) == (80 if kind.startswith("labelled") else 160)
    assert lengths.prompt_tokens == sizes(columns, "prompt_ids")
    assert lengths.completion_tokens == sizes(columns, "completion_ids")
    assert lengths.desirable == tuple(int(label) for label in columns["label"])
    dropped = dropped_places(lengths, 30)
    assert dropped
    assert without(lengths.prompt_tokens, dropped) == sizes(prepared_by("kto", model, tmp_path, 30), "prompt_ids")


def test_pairs_become_rows_in_the_order_of_trl(children: Children, model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "ba " * (number % 5 + 1), "chosen": "ko", "rejected": "li mu"} for number in range(1203)]
    lengths = measured(rows, "kto", children, model, tmp_path)
    columns = prepared_by("kto", model, tmp_path, None)
    assert lengths.completion_tokens == sizes(columns, "completion_ids")
    assert lengths.desirable == tuple(int(label) for label in columns["label"])


@pytest.mark.parametrize("method", ["grpo", "rloo", "online_dpo"])
@pytest.mark.parametrize("chat", [True, False])
def test_prompts_are_measured_as_the_online_methods_encode_them(
    method: Method, chat: bool, children: Children, model: Path, tmp_path: Path
) -> None:
    texts = [tiny.words(number % 30 + 1, seed=number) for number in range(60)]
    rows = [{"prompt": [user(text)] if chat else text, "answer": 3} for text in texts]
    lengths = measured(rows, method, children, model, tmp_path)
    assert lengths.tokens == lengths.prompt_tokens
    data = datasets.Dataset.from_list(rows)
    common = {"output_dir": str(tmp_path / "out"), "use_cpu": True, "bf16": False, "report_to": "none"}
    kind, config = (trl.RLOOTrainer, trl.RLOOConfig) if method == "rloo" else (trl.GRPOTrainer, trl.GRPOConfig)
    trainer = kind(
        model=str(model), reward_funcs=lambda completions, **_: [0.0], args=config(**common), train_dataset=data
    )
    ids = trainer._tokenize_prompts([row["prompt"] for row in rows])[0]
    assert lengths.prompt_tokens == tuple(len(row) for row in ids)


@pytest.mark.parametrize(
    ("method", "row", "said"),
    [
        ("dpo", {"text": "ba"}, "DPO reads `chosen` and `rejected`"),
        ("dpo", {"prompt": "ba", "completion": "ko"}, "`sft` trains on it"),
        ("kto", {"prompt": "ba", "completion": "ko"}, "`label`"),
        ("reward", {"prompt": "ba", "chosen": "ko"}, "`rejected`"),
        ("grpo", {"question": "ba"}, "GRPO reads `prompt`"),
    ],
)
def test_data_of_another_method_is_told_with_what_is_wanted(
    method: Method, row: dict[str, str], said: str, children: Children, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(AutotuneError) as caught:
        measure_lengths(job_of(model, [row], tmp_path), folder=tmp_path, children=children, method=method)
    assert all(f"`{column}`" in caught.value.what for column in row)
    assert said in caught.value.hint


def test_a_broken_row_of_preferences_is_named_by_its_number(children: Children, model: Path, tmp_path: Path) -> None:
    rows = pairs()
    rows[33] = {**rows[33], "chosen": None}
    with pytest.raises(AutotuneError, match="row 34 is null"):
        measure_lengths(job_of(model, rows, tmp_path), folder=tmp_path, children=children, method="dpo")
