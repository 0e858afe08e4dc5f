"""Which GPUs a program sees, and in what order: `CUDA_VISIBLE_DEVICES`, `CUDA_DEVICE_ORDER`, MIG slices, `--gpus`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from autotune.errors import AutotuneError
from autotune.probe.facts import Problem
from autotune.probe.gpu import Gpu

NO_GPU = ("", "-1", "NoDevFiles")  # how launchers and schedulers say that a program gets none


class Slice(msgspec.Struct, frozen=True):
    """A MIG slice; `old_name` is what drivers before R470 call it, `MIG-<GPU's UUID>/<GPU instance>/<compute>`."""

    uuid: str
    old_name: str | None
    handle: Any


class Card(msgspec.Struct, frozen=True):
    """A GPU as NVML lists it, with NVML's handles; None for what it does not tell.

    `handle` is None for a card that does not answer, which keeps its index. `slices` is None where MIG is off.
    `cores_megahertz` is cores x highest clock, `memory_bandwidth` bus width x highest memory clock: they only compare.
    """

    index: int
    uuid: str
    name: str
    handle: Any
    pci: str | None = None
    capability: tuple[int, int] | None = None
    cores_megahertz: int | None = None
    memory_bandwidth: int | None = None
    slices: tuple[Slice, ...] | None = None


class Shown(msgspec.Struct, frozen=True):
    """What a program gets for one device: a card, or one slice of it."""

    card: Card
    slice: Slice | None = None

    @property
    def uuid(self) -> str:
        return self.card.uuid if self.slice is None else self.slice.uuid


class Visible(msgspec.Struct, frozen=True):
    shown: tuple[Shown, ...]
    problems: tuple[Problem, ...] = ()


def visible(cards: Sequence[Card], environment: Mapping[str, str]) -> Visible:
    """What CUDA shows a program with this `environment`, in its order.

    `CUDA_VISIBLE_DEVICES` holds indices, UUIDs or beginnings of one that fit a single GPU; the list ends at the first
    entry that names none (CUDA programming guide, "CUDA environment variables"). The first entry decides whether all
    are read as indices, of which the leading digits count, or as UUIDs, which bear no space before them; the same
    entry twice shows none (torch 2.13, `torch/cuda/__init__.py`, `_parse_visible_devices`). Indices count in the
    order of `CUDA_DEVICE_ORDER`. Of MIG slices a program sees one, the first, and no whole GPU beside it (NVIDIA MIG
    user guide, "CUDA device enumeration").
    """
    setting = environment.get("CUDA_VISIBLE_DEVICES")
    ordered, assumption = _in_cuda_order(cards, environment.get("CUDA_DEVICE_ORDER"))
    problems: list[Problem] = []
    named = [Shown(card) for card in ordered] if setting is None else _named(ordered, setting, problems)
    by_index = setting is None or not setting.startswith(("GPU-", "MIG-"))
    if assumption is not None and by_index and named:
        problems.insert(0, assumption)
    usable: list[Shown] = []
    for one in named:
        if one.slice is not None or one.card.slices is None:
            usable += [one] if one.card.handle is not None else []
        else:
            usable += [Shown(one.card, piece) for piece in one.card.slices]
            problems += [_without_slice(one.card)] if not one.card.slices else []
    shown, of_slices = _one_slice(usable)
    return Visible(tuple(shown), (*problems, *of_slices))


def chosen_of(gpus: Sequence[Gpu], asked: str) -> tuple[Gpu, ...]:
    """The GPUs of a machine that is not here which `--gpus` names, in its order. Raises AutotuneError as `chosen`."""
    cards: dict[int, Card] = {}
    for gpu in gpus:
        pieces = tuple(Slice(one.uuid, None, one) for one in gpus if one.index == gpu.index and one.mig is not None)
        uuid = str(gpu.index) if pieces else gpu.uuid
        cards[gpu.index] = Card(gpu.index, uuid, gpu.name, handle=gpu, slices=pieces or None)
    named = chosen(list(cards.values()), asked, where="there").split(",")
    return tuple(gpu for name in named for gpu in gpus if name in (gpu.uuid, str(gpu.index)))


def chosen(cards: Sequence[Card], asked: str, *, where: str = "here") -> str:
    """`--gpus` as a `CUDA_VISIBLE_DEVICES` of UUIDs, which mean the same in every order.

    It takes the same forms; its indices are those of `nvidia-smi`. Raises AutotuneError, with the names that exist,
    for an entry that names no GPU, or several, and for a GPU named twice.
    """
    found: dict[str, str] = {}
    for entry in (part.strip() for part in asked.split(",")):
        if entry in NO_GPU:
            raise AutotuneError(
                f"`--gpus {asked}` has an entry that names no GPU",
                hint=f"{_names(cards)}; to tune on the CPU, set `CUDA_VISIBLE_DEVICES=` and leave out `--gpus`",
            )
        matches = [one for one in _every(cards) if _is(entry, one)]
        if entry.isdecimal():
            matches = [Shown(card) for card in cards if card.index == int(entry)]
        if not matches:
            raise AutotuneError(f"`--gpus {asked}` names `{entry}`, and that is no GPU {where}", hint=_names(cards))
        if len(matches) > 1:
            which = " and ".join(f"`{one.uuid}`" for one in matches[:2])
            raise AutotuneError(f"`--gpus {asked}` names `{entry}`, which begins both {which}", hint=_names(cards))
        uuid = matches[0].uuid
        if uuid in found:
            raise AutotuneError(
                f"`--gpus {asked}` names one GPU twice, as `{found[uuid]}` and as `{entry}`"
                if found[uuid] != entry
                else f"`--gpus {asked}` names `{entry}` twice",
                hint=f"name each GPU once; {_names(cards)}",
            )
        if matches[0].card.handle is None:
            raise AutotuneError(
                f"`--gpus {asked}` names GPU {matches[0].card.index}, which does not answer", hint=_names(cards)
            )
        found[uuid] = entry
    return ",".join(found)


def _names(cards: Sequence[Card]) -> str:
    """What `--gpus` can name: `0: NVIDIA A100-SXM4-80GB, GPU-…`."""
    lines = [f"{one.card.index}: {one.card.name}, {one.uuid}" for one in _every(cards) if one.card.handle is not None]
    return f"there {'is' if len(lines) == 1 else 'are'} {'; '.join(lines)}" if lines else "there is none"


def _in_cuda_order(cards: Sequence[Card], order: str | None) -> tuple[list[Card], Problem | None]:
    """The cards as CUDA's indices count them, and what to say where that is an assumption.

    `PCI_BUS_ID` is by place on the bus; else CUDA counts the fastest first by a rule it does not tell (CUDA
    programming guide, "CUDA_DEVICE_ORDER"), which leaves cards that are alike as they are.
    """
    by_bus = sorted(cards, key=lambda card: card.pci or "") if all(card.pci for card in cards) else list(cards)
    if order == "PCI_BUS_ID" or len({card.name for card in cards if card.handle is not None}) <= 1:
        return by_bus, None
    by_speed = sorted(by_bus, key=_speed, reverse=True)  # a stable sort, in reverse too
    listed = ", ".join(f"{place} = {card.name}" for place, card in enumerate(by_speed))
    return by_speed, Problem(
        what=f"the GPUs differ, and CUDA counts the fastest first by a rule of its own: taken as {listed}",
        hint="set `CUDA_DEVICE_ORDER=PCI_BUS_ID` to count them as `nvidia-smi` does, or name GPUs by UUID",
    )


def _speed(card: Card) -> tuple[tuple[int, int], int, int]:
    return card.capability or (0, 0), card.cores_megahertz or 0, card.memory_bandwidth or 0


def _named(ordered: list[Card], setting: str, problems: list[Problem]) -> list[Shown]:
    keys, ended_by = _keys(setting)
    named: list[Shown] = []
    for key in keys:
        matches = [one for one in _every(ordered) if _is(key, one)]
        if key.isdecimal():
            matches = [Shown(card) for card in ordered[int(key) :][:1]]
        if len(matches) != 1:
            ended_by = key
            break
        named.append(matches[0])
    uuids = {one.uuid for one in named}
    if len(set(keys)) < len(keys) or len(uuids) < len(named):
        problems.append(
            Problem(
                what=f"`CUDA_VISIBLE_DEVICES={setting}` names a GPU twice, so CUDA shows none",
                hint="name each GPU once",
            )
        )
        return []
    if ended_by is not None and ended_by not in NO_GPU and ordered:
        problems.append(_names_none(setting, ended_by))
    return named


def _keys(setting: str) -> tuple[list[str], str | None]:
    """The entries that have the form of the first, and the one that has not and ends the list."""
    keys: list[str] = []
    for entry in setting.split(","):
        if setting.startswith(("GPU-", "MIG-")):
            if not entry.startswith(setting[:4]):
                return keys, entry
            keys.append(entry)
            continue
        number = re.match(r"\+?([0-9]+)", entry.strip())  # as C's strtoul reads it
        if number is None:
            return keys, entry.strip()
        keys.append(str(int(number.group(1))))
    return keys, None


def _names_none(setting: str, entry: str) -> Problem:
    hint = "CUDA ignores that entry and all after it; see `nvidia-smi -L` for the names"
    if entry.strip().startswith(("GPU-", "MIG-")) and entry[:4] != setting[:4]:
        hint = (
            "CUDA ignores that entry and all after it; write all as the first is written, with no space before a UUID"
        )
    return Problem(
        what=f"`CUDA_VISIBLE_DEVICES={setting}` names `{entry.strip()}`, and that is not one GPU here", hint=hint
    )


def _every(cards: Sequence[Card]) -> list[Shown]:
    """Cards and slices, as UUIDs may name them."""
    return [Shown(card, piece) for card in cards for piece in (None, *(card.slices or ()))]


def _is(entry: str, one: Shown) -> bool:
    """Whether a UUID or its beginning names this: a card for `GPU-`, a slice for `MIG-`."""
    if one.slice is None:
        return entry.startswith("GPU-") and one.card.uuid.startswith(entry)
    names = (one.slice.uuid, one.slice.old_name or "")
    return entry.startswith("MIG-") and any(name.startswith(entry) for name in names)


def _without_slice(card: Card) -> Problem:
    return Problem(
        what=f"GPU {card.index} is in MIG mode and has no slice, so no program can use it",
        hint="make a slice with `nvidia-smi mig -cgi <profile> -C`, or switch MIG mode off",
    )


def _one_slice(usable: list[Shown]) -> tuple[list[Shown], list[Problem]]:
    first = next((one for one in usable if one.slice is not None), None)
    if first is None or len(usable) == 1:
        return usable, []
    note = Problem(
        what=f"CUDA shows a program one MIG slice and no GPU beside it: `{first.uuid}` of GPU {first.card.index}"
        f" is used and {len(usable) - 1} more {'is' if len(usable) == 2 else 'are'} not",
        hint="name another slice or GPU with `--gpus`, by its UUID in `nvidia-smi -L`; each can have a tuning at once",
    )
    return [first], [note]
