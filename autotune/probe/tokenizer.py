"""The child's side of loading the tokenizer that TRL's SFT trainer would use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from autotune.errors import AutotuneError

TOKENIZER_HINT = "use a model whose folder holds its tokenizer files, as tokenizer.json"


class Tokenizer(NamedTuple):
    """`processing_class` is what TRL passes rows through, `inner` its tokenizer: the same one without a vision part."""

    processing_class: Any
    inner: Any


def load(job: Mapping[str, Any]) -> Tokenizer:
    """Load it as `SFTTrainer.__init__` does (TRL 1.16), with the job's `eos_token` and `chat_template_path`.

    Raises AutotuneError where it cannot be loaded or does not know the end-of-sequence token.
    """
    import transformers

    name = job.get("model_name_or_path")
    if not name:
        raise AutotuneError("the job names no model", hint="set `model_name_or_path`")
    if name.startswith(("/", "./", "../", "~")) and not Path(name).is_dir():
        raise AutotuneError(
            f"there is no model folder `{name}`", hint=f"relative paths are looked up in `{Path.cwd()}`"
        )
    revision = {"revision": job.get("model_revision"), **(job.get("model_init_kwargs") or {})}["revision"]
    processing_class = _from_pretrained(
        transformers.AutoProcessor,
        name,
        revision=revision,
        trust_remote_code=bool(job.get("trust_remote_code")),
    )
    inner = getattr(processing_class, "tokenizer", processing_class)
    if not isinstance(inner, transformers.PreTrainedTokenizerBase):
        raise AutotuneError(f"`{name}` has no tokenizer", hint=TOKENIZER_HINT)
    known = inner.get_vocab()
    if set(known) <= set(inner.all_special_tokens):  # what transformers makes up where the files are missing
        raise AutotuneError(
            f"`{name}` has no tokenizer files, and transformers makes one up that knows `{' '.join(known)}` alone",
            hint=TOKENIZER_HINT,
        )
    eos_token = job.get("eos_token")
    if eos_token is not None:
        if eos_token not in known:
            raise AutotuneError(
                f"`eos_token: {eos_token}` is not in the vocabulary of `{name}`",
                hint=f"leave it out (the tokenizer's own is `{inner.eos_token}`), or name a token that exists",
            )
        inner.eos_token = eos_token
    if job.get("chat_template_path") is not None:
        _take_template(processing_class, inner, job["chat_template_path"])
    return Tokenizer(processing_class, inner)


def _from_pretrained(kind: Any, name: str, **options: Any) -> Any:
    try:
        return kind.from_pretrained(name, **options)
    except Exception as error:  # OSError, ValueError, ImportError and more, by what is missing
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise AutotuneError(
            f"the tokenizer of `{name}` cannot be loaded: {reason[:300]}",
            hint="check the name; without a network only a local folder or a model that was loaded before can be used",
        ) from error


def _take_template(processing_class: Any, inner: Any, path: str) -> None:
    import transformers

    if path.endswith((".jinja", ".j2")):
        try:
            processing_class.chat_template = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise AutotuneError(
                f"`chat_template_path: {path}` cannot be read: {error.strerror}",
                hint=f"relative paths are looked up in `{Path.cwd()}`",
            ) from error
        return
    # TRL clones the template, the added tokens and the end-of-sequence token of another model's tokenizer
    source = _from_pretrained(transformers.AutoTokenizer, path)
    processing_class.chat_template = source.get_chat_template()
    known = inner.get_vocab()
    inner.add_tokens([token for token in source.added_tokens_decoder.values() if token.content not in known])
    inner.eos_token = source.eos_token
