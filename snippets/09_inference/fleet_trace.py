"""Generate a trace of requests: chats and agents that share system prompts and grow in turns.

All parameters of the trace are at the top of the program. They are assumptions, and none of
them was measured on users. The arrivals are open loop: a turn arrives at its time, even if the
server has not finished the answer before it. Lengths are in tokens, and times in seconds. The
random numbers are integers, so every machine generates the same trace. The other programs of
the fleet import it.

Look at the column "of all prompt tokens", and at the share of tokens that a cache could find.
"""

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from functools import cache

# --8<-- [start:law]
SECONDS = 240  # duration of the trace
PERIOD, SWING = 120, 0.6  # the rate follows a sine wave of 120 s, ±60% around its mean
STARTS = 6.5  # new conversations per second, on average
SEED = 1  # another seed gives another trace with the same parameters
SYSTEMS = (1024, 512, 2048, 4096)  # tokens of the system prompts; the last one is for agents
SHARES = (0.60, 0.15, 0.10, 0.15)  # of the conversations that begin with each system prompt
LONGEST = 32_768  # tokens of a prompt with its answer
# --8<-- [end:law]


# --8<-- [start:kinds]
@dataclass(frozen=True)
class Kind:
    """The parameters of a conversation. Lengths are log-normal: a median, and σ of the log."""

    turns: float  # mean number of turns (geometric distribution)
    first: tuple[int, float]  # tokens of the first turn after the system prompt
    later: tuple[int, float]  # tokens that each further turn adds
    answer: tuple[int, float]
    pause: float  # mean seconds between an answer and the next turn (exponential)


CHAT = Kind(4, (100, 1.0), (60, 1.0), (200, 0.7), 20)
AGENT = Kind(10, (6000, 0.7), (500, 1.0), (100, 0.6), 3)
# --8<-- [end:kinds]
READ = 0.03  # seconds per token of an answer, before the pause begins


@dataclass(frozen=True)
class Request:
    """One turn. Its prompt is the whole conversation so far, in tokens."""

    number: int
    arrival: float
    conversation: int
    system: int  # index of the system prompt
    shared: int  # tokens of the system prompt
    prompt: int
    answer: int


class Generator:
    """Random integers from a linear congruential generator, equal in every language."""

    def __init__(self, seed: int) -> None:
        self.state = 2654435761 * seed % 2**32

    def uniform(self) -> int:
        """A uniform integer below 2²⁰."""
        self.state = (1664525 * self.state + 1013904223) % 2**32
        return self.state >> 12

    def exponential(self) -> int:
        """An exponential integer with the mean 2²⁰.

        Von Neumann's method counts falling runs of uniform numbers, so it needs no logarithm.
        """
        for whole in itertools.count():
            first = last = self.uniform()
            length = 1
            while (drawn := self.uniform()) < last:
                last = drawn
                length += 1
            if length % 2:
                return (whole << 20) + first
        raise AssertionError


def lognormal(random: Generator, median: float, sigma: float) -> int:
    """A log-normal integer. The sum of twelve uniform numbers replaces the normal one."""
    normal = sum(random.uniform() for _ in range(12)) / 2**20 - 6
    return max(1, round(median * math.exp(sigma * normal)))


# --8<-- [start:make]
def rate(at: float, period: float, starts: float) -> float:
    """New conversations per second at a time: a day that lasts only two minutes."""
    return starts * (1 + SWING * math.sin(2 * math.pi * at / period))


@cache
def trace(
    seconds: float = SECONDS, period: float = PERIOD, starts: float = STARTS
) -> tuple[Request, ...]:
    """All turns of all conversations in the order of arrival.

    Conversations start as a Poisson process with a rate that changes. It is drawn by thinning
    (Lewis and Shedler, 1979): draw at the highest rate, and keep each start with the
    probability rate / highest.
    """
    random, clock, highest, found = Generator(SEED), 0.0, starts * (1 + SWING), []
    for conversation in itertools.count():
        while True:
            clock += random.exponential() / 2**20 / highest
            if random.uniform() / 2**20 * highest < rate(clock, period, starts):
                break
        if clock >= seconds:
            break
        drawn = random.uniform() / 2**20
        system = next(i for i, part in enumerate(itertools.accumulate(SHARES)) if drawn < part)
        kind = AGENT if system == len(SHARES) - 1 else CHAT
        at, length = clock, SYSTEMS[system]
        for turn in itertools.count():
            length += lognormal(random, *(kind.later if turn else kind.first))
            answer = 1 + lognormal(random, *kind.answer)
            if at >= seconds or length + answer > LONGEST:
                break
            found.append((at, conversation, system, SYSTEMS[system], length, answer))
            if random.uniform() * kind.turns < 2**20:  # this was the last turn
                break
            at += answer * READ + kind.pause * random.exponential() / 2**20
            length += answer
    return tuple(Request(number, *each) for number, each in enumerate(sorted(found)))


# --8<-- [end:make]


def reusable(requests: tuple[Request, ...]) -> int:
    """The prompt tokens that a cache without eviction would find."""
    known: dict[tuple[str, int], int] = {}
    saved = 0
    for r in requests:
        system, conversation = ("system", r.system), ("conversation", r.conversation)
        saved += known.get(conversation, known.get(system, 0))
        known[system] = r.shared
        known[conversation] = r.prompt + r.answer - 1  # the last token is never an input
    return saved


def main() -> None:
    requests = trace()
    count, prompts = len(requests), sum(r.prompt for r in requests)
    answers = sum(r.answer for r in requests)
    conversations = {r.conversation: r for r in requests}
    print(
        f"{SECONDS} s: {len(conversations)} conversations, {count} requests, "
        f"{count / SECONDS:.1f} per second"
    )
    print("          of all    prompt tokens    answer tokens   of all prompt")
    print("        requests   median     p99   median     p99          tokens")
    for kind, chosen in (
        ("chats", [r for r in requests if r.system < 3]),
        ("agents", [r for r in requests if r.system == 3]),
    ):
        columns = [sorted(r.prompt for r in chosen), sorted(r.answer for r in chosen)]
        middle, late = len(chosen) // 2, len(chosen) * 99 // 100
        (p, p99), (a, a99) = ((c[middle], c[late]) for c in columns)
        print(
            f"{kind:7} {len(chosen) / count:8.0%} {p:8,} {p99:7,} {a:8,} {a99:7,} "
            f"{sum(r.prompt for r in chosen) / prompts:15.0%}"
        )
    per_second = Counter(int(r.arrival // 10) for r in requests).values()
    print(f"requests in 10 s: from {min(per_second)} to {max(per_second)}")
    saved = reusable(requests)
    print(f"{prompts:,} prompt tokens, {answers:,} answer tokens")
    print(f"a cache without eviction would find {saved / prompts:.1%} of the prompt tokens")

    starts = len(conversations) / SECONDS  # compare with closed forms
    assert abs(starts / STARTS - 1) < 4 / math.sqrt(STARTS * SECONDS), "Poisson: 4σ"
    up = sum(
        r.arrival % PERIOD < PERIOD / 2
        for r in {r.conversation: r for r in reversed(requests)}.values()
    )
    assert abs(up / len(conversations) - (1 + SWING * 2 / math.pi) / 2) < 0.03, "the swing"
    random = Generator(7)
    drawn = [lognormal(random, 200, 0.7) for _ in range(20_000)]
    mean = sum(drawn) / len(drawn)
    assert abs(mean / (200 * math.exp(0.7**2 / 2)) - 1) < 0.03, "a log-normal's mean"
    last = {}
    for r in requests:  # the turns of a conversation arrive in order and grow
        assert r.shared < r.prompt and r.prompt > last.get(r.conversation, 0)
        last[r.conversation] = r.prompt + r.answer


if __name__ == "__main__":
    main()
