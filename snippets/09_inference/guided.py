"""Guided decoding: a schema becomes an automaton over characters, and then masks over tokens.

The model is a table of which token follows which, learned from JSON records that mostly violate
the schema. Without masks almost no answer fits, and with masks every answer does. The program
also measures the cost of masks, their effect on the distribution, and the trap of forced text.
"""

import json
import math
import random
import re
from collections import Counter
from functools import cache
from itertools import pairwise

LETTERS, DIGITS = "abcdefghijklmnopqrstuvwxyz", "0123456789"
SCHEMA = {
    "city": {"type": "string", "maxLength": 8},
    "unit": {"enum": ["celsius", "kelvin"]},
    "degrees": {"type": "integer"},  # at most three digits here
}
PATTERN = (
    r'\{"city": "[a-z]{1,8}", "unit": "(celsius|kelvin)", "degrees": (0|[1-9][0-9]{0,2})\}'
)

# --8<-- [start:automaton]
# A language: ("empty",), ("chars", set), ("then", a, b) or ("or", set of languages)
EMPTY, NOTHING = ("empty",), ("or", frozenset())


def text(characters: str) -> tuple:
    return then(*(("chars", frozenset(c)) for c in characters))


def then(*parts: tuple) -> tuple:
    if len(parts) < 2:
        return parts[0] if parts else EMPTY
    first, rest = parts[0], then(*parts[1:])
    if NOTHING in (first, rest):
        return NOTHING
    return rest if first == EMPTY else first if rest == EMPTY else ("then", first, rest)


def either(*parts: tuple) -> tuple:
    flat = frozenset(q for p in parts for q in (p[1] if p[0] == "or" else [p]))
    return next(iter(flat)) if len(flat) == 1 else ("or", flat)


def up_to(part: tuple, most: int) -> tuple:
    return either(EMPTY, then(part, up_to(part, most - 1))) if most else EMPTY


def language(schema: dict) -> tuple:
    """Of a value; an object's keys come in the order of the schema."""
    if "enum" in schema:
        return either(*(text(json.dumps(value)) for value in schema["enum"]))
    if schema.get("type") == "string":
        letter = ("chars", frozenset(LETTERS))
        return then(text('"'), letter, up_to(letter, schema["maxLength"] - 1), text('"'))
    if schema.get("type") == "integer":
        digits = up_to(("chars", frozenset(DIGITS)), 2)
        return either(text("0"), then(("chars", frozenset(DIGITS[1:])), digits))
    members = [then(text(f'"{key}": '), language(value)) for key, value in schema.items()]
    commas = [part for member in members for part in (text(", "), member)][1:]
    return then(text("{"), *commas, text("}"))


@cache
def can_end(lang: tuple) -> bool:
    if lang[0] == "or":
        return any(can_end(part) for part in lang[1])
    return lang == EMPTY or (lang[0] == "then" and can_end(lang[1]) and can_end(lang[2]))


@cache
def after(lang: tuple, c: str) -> tuple:
    """What may follow the character `c`: Brzozowski's derivative of the language."""
    if lang[0] == "chars":
        return EMPTY if c in lang[1] else NOTHING
    if lang[0] == "or":
        return either(*(after(part, c) for part in lang[1]))
    if lang == EMPTY:
        return NOTHING
    rest = then(after(lang[1], c), lang[2])
    return either(rest, after(lang[2], c)) if can_end(lang[1]) else rest


# --8<-- [end:automaton]


# --8<-- [start:masks]
class Automaton:
    """States are numbers; step[state] has the characters that may come and where they lead."""

    def __init__(self, start: tuple, alphabet: str) -> None:
        numbers, self.step = {start: 0}, []
        for lang in (states := [start]):  # grows as it is walked
            self.step.append({})
            for c in alphabet:
                if (following := after(lang, c)) != NOTHING:
                    if following not in numbers:
                        numbers[following] = len(states)
                        states.append(following)
                    self.step[-1][c] = numbers[following]
        self.ends = [can_end(lang) for lang in states]

    def walk(self, state: int | None, characters: str) -> int | None:
        for c in characters:
            state = None if state is None else self.step[state].get(c)
        return state

    def allowed(self, state: int, tokens: list[str]) -> dict[str, int]:
        """The mask of a state: every token that leads somewhere, and where; "" is the end."""
        led = {token: self.walk(state, token) for token in tokens if token}
        mask = {token: there for token, there in led.items() if there is not None}
        return mask | ({"": state} if self.ends[state] else {})

    def forced(self, state: int) -> str:
        """The characters that must come, whatever the model says."""
        found = ""
        while len(self.step[state]) == 1 and not self.ends[state]:
            [(c, state)] = self.step[state].items()
            found += c
        return found


# --8<-- [end:masks]


class Tokenizer:
    """Byte-pair encoding: the pair that comes most often becomes a token, again and again."""

    def __init__(self, lines: list[str], merges: int) -> None:
        self.merges: list[tuple[str, str]] = []
        words = [list(line) for line in lines]
        self.tokens = sorted({c for word in words for c in word} | set(LETTERS + DIGITS))
        for _ in range(merges):
            pairs = Counter(pair for word in words for pair in pairwise(word))
            short = [pair for pair in pairs if len("".join(pair)) <= 10]
            self.merges.append(max(short, key=lambda pair: (pairs[pair], pair)))
            self.tokens.append("".join(self.merges[-1]))
            words = [self.merge(word, self.merges[-1]) for word in words]

    @staticmethod
    def merge(word: list[str], pair: tuple[str, str]) -> list[str]:
        merged: list[str] = []
        for token in word:
            if merged and (merged[-1], token) == pair:
                merged[-1] += token
            else:
                merged.append(token)
        return merged

    def encode(self, characters: str) -> list[str]:
        word = list(characters)
        for pair in self.merges:
            word = self.merge(word, pair)
        return word


def records(count: int) -> list[str]:
    """Weather reports by people who never saw the schema."""
    draw, lines = random.Random(0), []
    for _ in range(count):
        city = "".join(draw.choices(LETTERS, k=draw.randint(3, 8)))
        unit = draw.choices(["cold", "fahrenheit", "celsius", "kelvin"], [5, 3, 1, 1])[0]
        members = [
            f'"city": "{city}"',
            f'"unit": "{unit}"',
            f'"degrees": {draw.randint(-9, 999)}',
        ]
        if draw.random() < 0.5:
            draw.shuffle(members)
        lines.append("{" + ", ".join(members[: draw.randint(2, 3)]) + "}")
    return lines


class Bigrams:
    """p(next token | last), smoothed: anything may follow anything; "" begins and ends."""

    def __init__(self, texts: list[list[str]], tokens: list[str]) -> None:
        pairs = Counter(pair for t in texts for pair in zip(["", *t], [*t, ""], strict=True))
        self.tokens, self.p = ["", *tokens], {}
        for last in self.tokens:
            counts = [pairs[last, token] + 0.02 for token in self.tokens]
            self.p[last] = [count / sum(counts) for count in counts]

    def draw(self, last: str, mask, generator: random.Random) -> str:
        """A token by the model, among those of `mask` if there is one."""
        weights = [p * (mask is None or token in mask)
                   for token, p in zip(self.tokens, self.p[last], strict=True)]  # fmt: skip
        return generator.choices(self.tokens, weights)[0]

    def bits(self, tokens: list[str]) -> float:
        pairs = zip(["", *tokens], [*tokens, ""], strict=True)
        return -sum(math.log2(self.p[a][self.tokens.index(b)]) for a, b in pairs)


# --8<-- [start:answer]
def answer(model: Bigrams, automaton, masks, ahead, generator) -> tuple[list[str], int]:
    """Tokens of an answer, and how many passes of the model they took."""
    tokens, state, passes = [], 0, 0
    while True:
        for token in ahead(state):  # no pass of their own: they ride with the next one
            tokens.append(token)
            state = automaton.walk(state, token)
        mask, passes = masks[state] if masks else None, passes + 1
        token = model.draw(tokens[-1] if tokens else "", mask, generator)
        if not token or len(tokens) == 60:
            return tokens, passes
        tokens.append(token)
        state = masks[state][token] if masks else 0


# --8<-- [end:answer]


# --8<-- [start:exact]
def fits(model: Bigrams, masks: list[dict[str, int]]) -> float:
    """The probability that the model, unmasked, writes an answer of the language."""

    @cache
    def from_here(state: int, last: str) -> float:
        p = dict(zip(model.tokens, model.p[last], strict=True))
        return sum(p[token] * (from_here(there, token) if token else 1)
                   for token, there in masks[state].items())  # fmt: skip

    return from_here(0, "")


def masked(model: Bigrams, masks, wanted: Automaton) -> float:
    """The probability that sampling under the masks ends in the language of `wanted`."""

    @cache
    def from_here(state: int, narrow: int | None, last: str) -> float:
        if narrow is None:
            return 0
        p = dict(zip(model.tokens, model.p[last], strict=True))
        total = sum(p[token] for token in masks[state])
        return sum(p[token] / total * (from_here(there, wanted.walk(narrow, token), token)
                                       if token else wanted.ends[narrow])
                   for token, there in masks[state].items())  # fmt: skip

    return from_here(0, 0, "")


# --8<-- [end:exact]


def stepped(automaton: Automaton, tokens: list[str]) -> tuple[int, int]:
    """Characters followed for all masks: token by token, and through a trie of the tokens."""
    trie = {token[:end] for token in tokens for end in range(1, len(token) + 1)}
    one_by_one = shared = 0
    for state in range(len(automaton.step)):
        for token in tokens:  # up to the first character that cannot come
            fit = [automaton.walk(state, token[:end]) is not None for end in range(len(token))]
            one_by_one += sum(fit)
        shared += sum(automaton.walk(state, node[:-1]) is not None for node in trie)
    return one_by_one, shared


def main() -> None:
    lines = records(200)
    tokenizer = Tokenizer(lines, 45)
    model = Bigrams([tokenizer.encode(line) for line in lines], tokenizer.tokens)
    vocabulary = tokenizer.tokens
    alphabet = "".join(token for token in vocabulary if len(token) == 1)
    automaton = Automaton(language(SCHEMA), alphabet)
    states = range(len(automaton.step))
    masks = [automaton.allowed(state, model.tokens) for state in states]
    draw, agree = random.Random(0), 0
    for _ in range(2000):  # held to Python's own regular expressions, on texts that nearly fit
        characters = list('{"city": "oslo", "unit": "kelvin", "degrees": 17}')
        for _ in range(draw.randint(0, 2)):
            characters[draw.randrange(len(characters))] = draw.choice([*alphabet, ""])
        state = automaton.walk(0, "".join(characters))
        accepted = state is not None and automaton.ends[state]
        assert accepted == bool(re.fullmatch(PATTERN, "".join(characters)))
        agree += accepted
    print(f"{len(states)} states; of 2,000 texts that nearly fit, the {agree} that re accepts")

    one_by_one, shared = stepped(automaton, vocabulary)
    assert one_by_one > shared
    size, llama = len(vocabulary) + 1, 128_256
    print(f"masks of {size} tokens for every state: {one_by_one} characters followed one token "
          f"after the other, {shared} in a trie")  # fmt: skip
    print(f"a table of them: {math.ceil(size / 8) * len(states)} bytes; of Llama 3's {llama:,} "
          f"tokens {llama // 8 * len(states) / 1e6:.1f} MB")  # fmt: skip
    one_character = sum(len(each) == 1 for each in automaton.step)
    one_token = sum(len(mask) == 1 for mask in masks)
    print(f"states where one character can come: {one_character}; one token: {one_token}")

    def naive(state: int) -> list[str]:
        return tokenizer.encode(automaton.forced(state))

    # --8<-- [start:healed]
    def healed(state: int) -> list[str]:
        """Forced tokens, without those that a token reaching over the end would replace."""
        forced = automaton.forced(state)
        tokens = tokenizer.encode(forced)
        safe = min(
            (at for at in range(len(forced)) for token in vocabulary
             if token.startswith(forced[at:]) and token != forced[at:]
             and automaton.walk(state, forced[:at] + token) is not None),
            default=len(forced),
        )  # fmt: skip
        while len("".join(tokens)) > safe:
            tokens.pop()
        return tokens

    # --8<-- [end:healed]
    kelvin = Automaton(language(SCHEMA | {"unit": {"enum": ["kelvin"]}}), alphabet)
    narrow = [kelvin.allowed(state, model.tokens) for state in range(len(kelvin.step))]
    all_fit, sampled = fits(model, masks), masked(model, masks, kelvin)
    conditional = fits(model, narrow) / all_fit
    print("500 answers          fit   tokens   passes   cut as the tokenizer would   kelvin")
    shares = {}
    for words, table, ahead in (
        ("no masks", None, lambda state: []),
        ("masks", masks, lambda state: []),
        ("forced, naively", masks, naive),
        ("forced, healed", masks, healed),
    ):
        generator = random.Random(1)
        answers = [answer(model, automaton, table, ahead, generator) for _ in range(500)]
        tokens, passes = zip(*answers, strict=True)
        texts = ["".join(each) for each in tokens]
        fit = sum(bool(re.fullmatch(PATTERN, each)) for each in texts)
        own = sum(
            tokenizer.encode(each) == cut for each, cut in zip(texts, tokens, strict=True)
        )
        shares[words] = sum("kelvin" in each for each in texts) / 500
        print(f"{words:18} {fit:5} {sum(map(len, tokens)) / 500:8.1f} {sum(passes) / 500:8.1f} "
              f"{own:15} {shares[words]:24.0%}")  # fmt: skip
        assert (fit == 500) == bool(table)
        if table:
            assert all(json.loads(each).keys() == SCHEMA.keys() for each in texts)
    print(f"exactly: {all_fit:.2%} of answers without masks fit, kelvin in {conditional:.0%} "
          f"of those; under masks in {sampled:.0%}")  # fmt: skip
    assert abs(shares["masks"] - sampled) < 0.07, "the exact share is not the sampled one"


if __name__ == "__main__":
    main()
