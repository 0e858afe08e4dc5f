"""Made-up conversations for `--demo`, with the long tail that real ones have."""

from __future__ import annotations

import random

import msgspec

SEED = 20
ROWS = 2000
# Tokens of a conversation: log-normal, median 96, so p90 310, p99 800. The longest are cut off at MOST_TOKENS.
MEDIAN_TOKENS = 96
SPREAD = 0.915
FEWEST_TOKENS = 24
MOST_TOKENS = 1900

OPENINGS = (
    "Could you tell me about",
    "How do I look after",
    "What happened to",
    "Write a few lines on",
    "Where can I find",
    "Why does everyone like",
    "Give me a recipe for",
    "Plan a quiet day with",
)
ADJECTIVES = (
    "amber brave calm clear copper dusty early gentle glad golden green hidden humble kind late little lucky mellow "
    "misty new odd old pale patient plain proud quick quiet rosy round salty silver sleepy slow small soft spare "
    "sunny tidy warm wide wild willing wooden young"
).split()
FIRST_HALVES = (
    "apple barley bell bread brook cedar chalk clover cloud corn dew drift ember fern field fox frost garden harbour "
    "hazel honey ink island ivy kettle lake lamp lark lemon linen maple meadow mill moon moss oak olive orchard otter "
    "paper pear pebble pepper pine plum rain reed river sand sea shell snow song spring star stone straw sugar summer "
    "thistle tide tin tulip velvet walnut willow wind winter wool"
).split()
SECOND_HALVES = (
    "basket bench bird boat book bottle box bridge broom cake candle cart chest choir clock cloak cup dance door "
    "feast fence fiddle flute gate glass hat house jar key ladder lantern letter loaf loom map market mirror nest "
    "path picnic pillow pocket post quilt road roof saddle school ship shop shore song soup spoon stair stove table "
    "tale tower train tree wagon wheel window yard"
).split()
VERBS = (
    "admires answers balances borrows brightens brings carries catches circles collects colours counts draws drapes "
    "finds follows gathers greets guards hides holds hums keeps knows leaves lends lifts likes listens loves makes "
    "mends minds misses moves needs offers opens paints passes plants polishes praises reads remembers rests returns "
    "shares sings sorts steadies teaches thanks trusts visits waits warms watches welcomes"
).split()
PLACES = (
    "by the sea",
    "near the old mill",
    "under two bridges",
    "at noon",
    "before breakfast",
    "on the third floor",
    "behind the bakery",
    "all winter long",
    "without any hurry",
    "for a friend",
    "on market days",
    "when the rain stops",
)


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str


class Conversation(msgspec.Struct, frozen=True):
    """One row of the data."""

    messages: tuple[Message, ...]


def conversations() -> list[Conversation]:
    """The data, the same on every machine."""
    chance = random.Random(SEED)
    return [_conversation(chance, tokens=_length(chance)) for _ in range(ROWS)]


def _length(chance: random.Random) -> int:
    tokens = MEDIAN_TOKENS * chance.lognormvariate(0.0, SPREAD)
    return int(min(MOST_TOKENS, max(FEWEST_TOKENS, tokens)))


def _conversation(chance: random.Random, *, tokens: int) -> Conversation:
    turns = 1 + sum(tokens > limit * chance.uniform(0.5, 1.5) for limit in (150, 300, 600))
    each = tokens // turns
    messages: list[Message] = []
    for _ in range(turns):
        subject = _thing(chance)
        question = f"{chance.choice(OPENINGS)} the {subject}?"
        messages.append(Message("user", question))
        messages.append(Message("assistant", _answer(chance, subject, tokens=each - len(question.split()) - 14)))
    return Conversation(tuple(messages))


def _answer(chance: random.Random, subject: str, *, tokens: int) -> str:
    """About `tokens` tokens of whole sentences; the tokenizer makes 1.28 of a word with its punctuation."""
    answer: list[str] = []
    while True:
        words = _sentence(chance, subject).split()
        if answer and (len(answer) + len(words) / 2) * 1.28 > tokens:
            return " ".join(answer)
        answer += words
        if chance.random() < 0.6:
            subject = _thing(chance)


def _sentence(chance: random.Random, subject: str) -> str:
    start = f"The {subject} {chance.choice(VERBS)} the {_thing(chance)}"
    match chance.randrange(4):
        case 0:
            return f"{start}."
        case 1:
            return f"{start} {chance.choice(PLACES)}."
        case 2:
            return f"{start}, and the {_thing(chance)} {chance.choice(VERBS)} it {chance.choice(PLACES)}."
        case _:
            return f"{chance.choice(PLACES).capitalize()}, {start[0].lower()}{start[1:]}."


def _thing(chance: random.Random) -> str:
    name = chance.choice(FIRST_HALVES) + chance.choice(SECOND_HALVES)
    return f"{chance.choice(ADJECTIVES)} {name}" if chance.random() < 0.5 else name
