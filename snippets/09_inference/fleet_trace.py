"""A trace: conversations and agents that share prompts, come in waves and grow turn by turn.

The law stands below, number by number; none of it is measured on users. Times are open loop: a
turn comes when the trace says so, however slow the server. The other programs of the fleet
import it. Lengths are tokens, times seconds; the dice are whole numbers, the same everywhere.
"""

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from functools import cache

# --8<-- [start:law]
SECONDS, PERIOD, SWING = 240, 120, 0.6  # long; of a wave; the rate goes ±60% around its mean
STARTS = 6.5  # conversations a second, on average
SEED = 1  # of the dice: another one is another trace of the same law
SYSTEMS = (1024, 512, 2048, 4096)  # shared first tokens: assistants, and the agents' tools
SHARES = (0.60, 0.15, 0.10, 0.15)  # of the conversations
LONGEST = 32_768


@dataclass(frozen=True)
class Kind:
    """What a conversation is made of; lengths are log-normal: a median, and σ of the log."""

    turns: float  # on average; geometric
    first: tuple[int, float]  # what comes with the first turn, behind the shared tokens
    later: tuple[int, float]  # what each further turn brings
    answer: tuple[int, float]
    pause: float  # from one answer to the next turn, on average; exponential


CHAT = Kind(4, (100, 1.0), (60, 1.0), (200, 0.7), 20)
AGENT = Kind(10, (6000, 0.7), (500, 1.0), (100, 0.6), 3)
READ = 0.03  # seconds a token of an answer: when the trace takes it to have ended


@dataclass(frozen=True)
class Request:
    """One turn: `prompt` has all that came before it, and begins with `shared` tokens."""

    number: int
    arrival: float
    conversation: int
    system: int
    shared: int
    prompt: int
    answer: int


# --8<-- [end:law]


class Dice:
    """Whole numbers from a linear congruential generator: every language has the same."""

    def __init__(self, seed: int) -> None:
        self.state = 2654435761 * seed % 2**32

    def uniform(self) -> int:
        """Below 2²⁰."""
        self.state = (1664525 * self.state + 1013904223) % 2**32
        return self.state >> 12

    def exponential(self) -> int:
        """With mean 2²⁰, by von Neumann: runs that fall, in place of a logarithm."""
        for whole in itertools.count():
            first = last = self.uniform()
            falling = 1
            while (drawn := self.uniform()) < last:
                last = drawn
                falling += 1
            if falling % 2:
                return (whole << 20) + first
        raise AssertionError


def lognormal(dice: Dice, median: float, sigma: float) -> int:
    """Its logarithm is the sum of twelve uniforms: normal, and never beyond six σ."""
    normal = sum(dice.uniform() for _ in range(12)) / 2**20 - 6
    return max(1, round(median * math.exp(sigma * normal)))


# --8<-- [start:make]
def rate(at: float, period: float, starts: float) -> float:
    """Conversations a second at a moment: a day that takes two minutes."""
    return starts * (1 + SWING * math.sin(2 * math.pi * at / period))


@cache
def trace(
    seconds: float = SECONDS, period: float = PERIOD, starts: float = STARTS
) -> tuple[Request, ...]:
    """All turns in order of arrival.

    Starts are Poisson with a rate that swings, by thinning: draw at the highest rate, and keep
    each with the chance rate / highest (Lewis and Shedler, 1979).
    """
    dice, clock, highest, found = Dice(SEED), 0.0, starts * (1 + SWING), []
    for conversation in itertools.count():
        while True:
            clock += dice.exponential() / 2**20 / highest
            if dice.uniform() / 2**20 * highest < rate(clock, period, starts):
                break
        if clock >= seconds:
            break
        drawn = dice.uniform() / 2**20
        system = next(i for i, part in enumerate(itertools.accumulate(SHARES)) if drawn < part)
        kind = AGENT if system == len(SHARES) - 1 else CHAT
        at, length = clock, SYSTEMS[system]
        for turn in itertools.count():
            length += lognormal(dice, *(kind.later if turn else kind.first))
            answer = 1 + lognormal(dice, *kind.answer)
            if at >= seconds or length + answer > LONGEST:
                break
            found.append((at, conversation, system, SYSTEMS[system], length, answer))
            if dice.uniform() * kind.turns < 2**20:  # the last one
                break
            at += answer * READ + kind.pause * dice.exponential() / 2**20
            length += answer
    return tuple(Request(number, *each) for number, each in enumerate(sorted(found)))


# --8<-- [end:make]


def reusable(requests: tuple[Request, ...]) -> int:
    """Tokens of prompts that a cache which forgets nothing would hold already."""
    known: dict[tuple[str, int], int] = {}
    saved = 0
    for r in requests:
        system, own = ("system", r.system), ("own", r.conversation)
        saved += known.get(own, known.get(system, 0))
        known[system] = r.shared
        known[own] = r.prompt + r.answer - 1  # the last token was drawn, and never run
    return saved


def main() -> None:
    requests = trace()
    count, prompts = len(requests), sum(r.prompt for r in requests)
    answers = sum(r.answer for r in requests)
    conversations = {r.conversation: r for r in requests}
    print(
        f"{SECONDS} s: {len(conversations)} conversations, {count} requests, "
        f"{count / SECONDS:.1f} a second"
    )
    print("                  of the requests   prompt: median    p99   answer: median    p99")
    for words, chosen in (
        ("chat", [r for r in requests if r.system < 3]),
        ("agents", [r for r in requests if r.system == 3]),
    ):
        columns = [sorted(r.prompt for r in chosen), sorted(r.answer for r in chosen)]
        middle, late = len(chosen) // 2, len(chosen) * 99 // 100
        (p, p99), (a, a99) = ((c[middle], c[late]) for c in columns)
        print(
            f"{words:17} {len(chosen) / count:15.0%} {p:16,} {p99:6,} {a:16,} {a99:6,}   "
            f"{sum(r.prompt for r in chosen) / prompts:.0%} of all prompt tokens"
        )
    per_second = Counter(int(r.arrival // 10) for r in requests).values()
    print(f"requests in ten seconds: {min(per_second)} to {max(per_second)}")
    saved = reusable(requests)
    print(f"tokens: {prompts:,} of prompts, {answers:,} of answers")
    print(f"of the prompts a cache that forgets nothing holds {saved / prompts:.1%}")

    starts = len(conversations) / SECONDS  # the law, in closed form
    assert abs(starts / STARTS - 1) < 4 / math.sqrt(STARTS * SECONDS), "Poisson: ± the root"
    up = sum(
        r.arrival % PERIOD < PERIOD / 2
        for r in {r.conversation: r for r in reversed(requests)}.values()
    )
    assert abs(up / len(conversations) - (1 + SWING * 2 / math.pi) / 2) < 0.03, "the swing"
    dice = Dice(7)
    drawn = [lognormal(dice, 200, 0.7) for _ in range(20_000)]
    mean = sum(drawn) / len(drawn)
    assert abs(mean / (200 * math.exp(0.7**2 / 2)) - 1) < 0.03, "a log-normal's mean"
    last = {}
    for r in requests:  # a conversation only grows, and in order
        assert r.shared < r.prompt and r.prompt > last.get(r.conversation, 0)
        last[r.conversation] = r.prompt + r.answer


if __name__ == "__main__":
    main()
