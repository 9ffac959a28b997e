"""Verdict: decides what the reports of a group of ranks mean.

`judge` first looks at how the ranks ended, then compares the collectives that they called, and
then runs the second generator of the step, which compares the facts of all ranks.
"""

import re

from graders import sandbox
from graders.protocol import Blank, Group, Judge, RankReport, Wrong
from graders.step import Step

IMPORT_HINTS = {
    "SyntaxError": "syntax", "IndentationError": "syntax", "TabError": "syntax",
    "ModuleNotFoundError": "module",
}  # fmt: skip
MESSAGES = ("send", "recv", "isend", "irecv")  # each has one sender and one receiver
# an error like this can be the consequence of the end of a different rank
CONSEQUENCE = re.compile(r"gloo|Connection closed|peer|Broken pipe|Socket|timed out", re.I)


def judge(group: Group, step: Step) -> Judge:
    """Yield a sentence for each correct result of a group; raise `Blank` or `Wrong`."""
    judge_ends(group, step)
    found = [rank for rank in group.ranks if rank.end == "wrong"]
    if step.symmetric:
        # a rank that found a mistake made no further calls
        compare_calls(group, step, absent=not found)
    yield from min((rank.rights for rank in found or group.ranks), key=len)
    if found:
        wrong = min(found, key=lambda rank: len(rank.rights)).error
        raise Wrong(wrong["what"], wrong["hint"])
    if step.together is not None:
        try:
            yield from step.together(group) or ()
        except (Blank, Wrong):
            raise
        except Exception as error:
            what = f"what the ranks reported cannot be judged: {type(error).__name__}: {error}"
            raise Wrong(what, "report") from error


def excessive_reports(group: Group) -> Wrong | None:
    """Return a mistake if a rank called or printed more than the sandbox allows."""
    for r, rank in enumerate(group.ranks):
        if rank.events > sandbox.EVENTS:
            return Wrong(f"rank {r} called collectives without end", "endless")
        if rank.printed > sandbox.PRINTED:
            return Wrong(
                f"rank {r} printed more than {sandbox.size(sandbox.PRINTED)}", "output"
            )
    return None


# --- collectives --------------------------------------------------------------------------


def sleeps_without_reason(group: Group) -> bool:
    """Return whether all ranks made the same calls, and no rank is inside of a call."""
    sequences = [[(c.name, c.numel, c.detail) for c in rank.calls] for rank in group.ranks]
    last = [rank.calls[-1] for rank in group.ranks if rank.calls]
    inside = any(not call.returned and not call.asynchronous for call in last)
    return not inside and all(sequence == sequences[0] for sequence in sequences)


def compare_calls(group: Group, step: Step, absent: bool = True) -> None:
    """Raise `Wrong` if the ranks did not call the same collectives in the same order.

    `absent`: a call that some ranks did not reach counts as a difference.
    """
    for members in sorted({call.members for rank in group.ranks for call in rank.calls}):
        if set(members) <= set(range(group.world)):
            _compare_calls_of(group, members, step, absent)


def _compare_calls_of(group: Group, members: tuple[int, ...], step: Step, absent: bool) -> None:
    """Compare the collectives in the groups of these ranks. Messages are not compared."""
    ranks = members or range(group.world)
    sequences = [
        [
            (call.name, call.numel, call.detail)
            for call in group.ranks[r].calls
            if call.members == members and call.name not in MESSAGES
        ]
        for r in ranks
    ]
    for place in range(max(map(len, sequences))):
        here = [sequence[place] if place < len(sequence) else None for sequence in sequences]
        if len(set(here)) == 1 or (None in here and not absent):
            continue
        if None in here:
            callers = [call for call in here if call is not None]
            name, numel, _ = callers[0]
            names = _named(*(r for r, c in zip(ranks, here, strict=True) if c is not None))
            what = f"only {names} of {group.world} called {name} with {numel} elements"
            if members:
                what += f" in the group of {_named(*members)}"
            raise Wrong(what, "some_ranks")
        named = zip(ranks, here, strict=True)
        calls = [f"rank {r} called {c[0]} with {c[1]} elements {c[2]}" for r, c in named]
        what = f"call {place + 1} differs between the ranks: "
        what += ", and ".join(map(str.strip, calls))
        if len({call[:2] for call in here}) == 1 and here[0][0] == "broadcast":
            raise Wrong(what, "own_source")
        raise Wrong(what, step.order_hint)


def _who(step: Step, *ranks: int) -> str:
    """Return the ranks that failed, in words. Without a process group no rank is named."""
    return _named(*ranks) if step.joins else "your code"


def _named(*ranks: int) -> str:
    """Return the names of some ranks: "ranks 0, 1 and 2"."""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


# --- how the ranks ended ------------------------------------------------------------------


def judge_ends(group: Group, step: Step) -> None:
    """Raise `Blank` or `Wrong` if a rank failed, or if the group had to be stopped."""
    if group.excess is not None:
        raise group.excess
    blamed = _first_error(group)
    if blamed is not None:
        _judge_error(group, step, *blamed)
    if any(rank.end == "wrong" for rank in group.ranks):
        return  # the other ranks may wait for a rank that found a mistake
    if group.stopped:
        _judge_stopped(group, step)


def _first_error(group: Group) -> tuple[int, RankReport] | None:
    """Return the first rank whose error is not the consequence of a different rank's error."""
    failed = [(r, rank) for r, rank in enumerate(group.ranks) if rank.end in ("error", "left")]
    own = [
        (r, rank)
        for r, rank in failed
        if rank.end == "left" or not CONSEQUENCE.search(rank.error.get("text", ""))
    ]
    return (own or failed or [None])[0]


def _judge_error(group: Group, step: Step, r: int, rank: RankReport) -> None:
    """Raise `Blank` or `Wrong` for a rank that ended with an error or without a report."""
    who = _who(step, r)
    if rank.end == "left":
        _judge_exit(group, step, who, rank.status)
    kind, text = rank.error.get("kind"), rank.error.get("text", "")
    where = f", line {rank.error['line']}" if rank.error.get("line") else ""
    what = f"{who} failed: {kind}{where}: {text}"
    for words, hint in sandbox.REFUSED.items():
        if words in text:
            raise Wrong(what, hint)
    if rank.error["doing"] == "import" and kind != "SystemExit":
        wrong = f"the file cannot be imported: {kind}{where}: {text}"
        raise Wrong(wrong, IMPORT_HINTS.get(kind, "import"))
    if kind == "NotImplementedError" and re.match(r"step \d+: ", text):
        raise Blank(re.sub(r"^step \d+: ", "", text) + where)
    if kind == "LookupError" and not where:
        raise Wrong(f"the file has no {text}", "missing")
    if kind == "SystemExit":
        raise Wrong(f"{who} ended itself by sys.exit{where}", "exit")
    if kind == "RecursionError":
        raise Wrong(f"{who} failed: {kind}{where}", "recursion")
    for pattern, hint in step.crashes.items():
        if re.search(pattern, text):
            raise Wrong(what, hint)
    for pattern, hint in sandbox.CRASHES.items():
        if re.search(pattern, f"{kind}: {text}"):
            raise Wrong(what, hint)
    if CONSEQUENCE.search(text):
        compare_calls(group, step)
    raise Wrong(what, "missing" if kind == "TypeError" and "argument" in text else "crash")


def _judge_exit(group: Group, step: Step, who: str, status: int) -> None:
    """Raise `Wrong` for a rank that ended without a report."""
    how = f"signal {-status}" if status < 0 else f"exit status {status}"
    compare_calls(group, step, absent=False)  # gloo aborts if the sizes do not match
    what = f"{who} ended in the middle of the step ({how})"
    known = (hint for words, hint in step.crashes.items() if re.search(words, what))
    raise Wrong(what, next(known, "killed"))


def _judge_stopped(group: Group, step: Step) -> None:
    """Raise `Wrong` for a group that had to be stopped, although no rank had an error."""
    waiting = [r for r, rank in enumerate(group.ranks) if rank.end == "waiting"]
    lines = [
        f"{f'rank {r}' if step.joins else 'it'} was in line {group.ranks[r].line}"
        for r in waiting
        if group.ranks[r].line
    ]
    them = "it" if len(waiting) == 1 else "them"
    where = f": when the checker stopped {them}, {' and '.join(lines)}" if lines else ""
    endless = Wrong(f"{_who(step, *waiting)} did not end{where}", "endless")
    calls = [rank.calls[-1:] for rank in group.ranks if rank.busy]
    if any(not last or last[0].returned or last[0].asynchronous for last in calls):
        raise endless  # a rank computes outside of a collective, and others may wait for it
    if step.stuck is not None:
        step.stuck(group)
    try:
        compare_calls(group, step)
    except Wrong as wrong:
        raise Wrong(wrong.what + where, wrong.hint) from wrong
    blocked = [rank.calls[-1] for rank in group.ranks if rank.calls and rank.end == "waiting"]
    if blocked and not blocked[0].returned and not blocked[0].asynchronous:
        what = f"did not come out of {blocked[0].name}{where}"
        raise Wrong(f"{_who(step, *waiting)} {what}", "some_ranks")
    raise endless
