"""Decides what the reports of a group of ranks mean.

`judge` first checks how the ranks ended, and then compares the collectives that they called.
Finally it runs the second generator of the step, which compares the facts of all ranks.
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
# errors that a rank can get because a different rank has ended
CONSEQUENCE = re.compile(r"gloo|Connection closed|peer|Broken pipe|Socket|timed out", re.I)


def judge(group: Group, step: Step) -> Judge:
    """Yield a sentence for each correct result of a group.

    Raises `Blank` for a step that the learner has not written, and `Wrong` for a mistake.
    """
    judge_ends(group, step)
    found = [rank for rank in group.ranks if rank.end == "wrong"]
    if step.symmetric:
        # after a rank has found a mistake, it makes no further calls
        compare_calls(group, step, absent=not found)
    yield from min((rank.correct_results for rank in found or group.ranks), key=len)
    if found:
        wrong = min(found, key=lambda rank: len(rank.correct_results)).error
        raise Wrong(wrong["what"], wrong["hint"])
    if step.judge_group is not None:
        try:
            yield from step.judge_group(group) or ()
        except (Blank, Wrong):
            raise
        except Exception as error:
            what = f"the reports of the ranks cannot be judged: {type(error).__name__}: {error}"
            raise Wrong(what, "report") from error


def excessive_reports(group: Group) -> Wrong | None:
    """Return a `Wrong` if a rank sent more reports or output than the sandbox allows."""
    for r, rank in enumerate(group.ranks):
        if rank.events > sandbox.EVENTS:
            return Wrong(f"rank {r} called collectives without end", "endless")
        if rank.output_bytes > sandbox.OUTPUT:
            limit = sandbox.format_size(sandbox.OUTPUT)
            return Wrong(f"rank {r} printed more than {limit}", "output")
    return None


# --- collectives --------------------------------------------------------------------------


def sleeps_without_reason(group: Group) -> bool:
    """Return whether all ranks made the same calls, and no rank waits in a call."""
    sequences = [[(c.name, c.numel, c.detail) for c in rank.calls] for rank in group.ranks]
    last = [rank.calls[-1] for rank in group.ranks if rank.calls]
    inside = any(not call.returned and not call.asynchronous for call in last)
    return not inside and all(sequence == sequences[0] for sequence in sequences)


def compare_calls(group: Group, step: Step, absent: bool = True) -> None:
    """Raise `Wrong` if the ranks did not call the same collectives in the same order.

    If `absent` is true, a call that some ranks did not reach also counts as a difference.
    """
    for members in sorted({call.members for rank in group.ranks for call in rank.calls}):
        if set(members) <= set(range(group.world)):
            _compare_calls_of(group, members, step, absent)


def _compare_calls_of(group: Group, members: tuple[int, ...], step: Step, absent: bool) -> None:
    """Compare the collectives that these ranks called in a group of exactly these ranks.

    Messages between two ranks are not compared. `members` is empty for the group of all ranks.
    """
    ranks = members or range(group.world)
    sequences = [
        [
            (call.name, call.numel, call.detail)
            for call in group.ranks[r].calls
            if call.members == members and call.name not in MESSAGES
        ]
        for r in ranks
    ]
    for index in range(max(map(len, sequences))):
        calls = [sequence[index] if index < len(sequence) else None for sequence in sequences]
        if len(set(calls)) == 1 or (None in calls and not absent):
            continue
        if None in calls:
            callers = [r for r, call in zip(ranks, calls, strict=True) if call is not None]
            name, numel, _ = next(call for call in calls if call is not None)
            what = f"only {names_of(*callers)} of {group.world} called {name} with {numel} "
            what += "elements"
            if members:
                what += f" in the group of {names_of(*members)}"
            raise Wrong(what, "some_ranks")
        clauses = [
            f"rank {r} called {name} with {numel} elements {detail}".strip()
            for r, (name, numel, detail) in zip(ranks, calls, strict=True)
        ]
        what = f"call {index + 1} differs between the ranks: {', and '.join(clauses)}"
        if len({call[:2] for call in calls}) == 1 and calls[0][0] == "broadcast":
            raise Wrong(what, "own_source")
        raise Wrong(what, step.order_hint)


def _subject(step: Step, *ranks: int) -> str:
    """Return the subject of a sentence about ranks: their names, or "your code".

    The subject is "your code" if the step has no process group.
    """
    return names_of(*ranks) if step.joins else "your code"


def names_of(*ranks: int) -> str:
    """Return the names of ranks, such as "rank 0" or "ranks 0, 1 and 2"."""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


# --- how the ranks ended ------------------------------------------------------------------


def judge_ends(group: Group, step: Step) -> None:
    """Raise `Blank` or `Wrong` if a rank failed, or if the group had to be stopped."""
    if group.excess is not None:
        raise group.excess
    failure = _first_failure(group)
    if failure is not None:
        _judge_failure(group, step, *failure)
    if any(rank.end == "wrong" for rank in group.ranks):
        return  # the other ranks may wait for a rank that found a mistake
    if group.stopped:
        _judge_stopped(group, step)


def _first_failure(group: Group) -> tuple[int, RankReport] | None:
    """Return the first rank that failed, with its number, or None if no rank failed.

    A rank whose error can be the consequence of a different failure is returned only if all
    ranks that failed have such an error.
    """
    failures = [
        (r, rank) for r, rank in enumerate(group.ranks) if rank.end in ("error", "exited")
    ]
    causes = [
        (r, rank)
        for r, rank in failures
        if rank.end == "exited" or not CONSEQUENCE.search(rank.error.get("text", ""))
    ]
    return (causes or failures or [None])[0]


def _judge_failure(group: Group, step: Step, r: int, rank: RankReport) -> None:
    """Raise `Blank` or `Wrong` for a rank that ended with an error or without a report."""
    subject = _subject(step, r)
    if rank.end == "exited":
        _judge_exit(group, step, subject, rank.status)
    kind, text = rank.error.get("kind"), rank.error.get("text", "")
    where = f", line {rank.error['line']}" if rank.error.get("line") else ""
    what = f"{subject} failed: {kind}{where}: {text}"
    for words, hint in sandbox.REFUSALS.items():
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
        raise Wrong(f"{subject} ended itself by sys.exit{where}", "exit")
    if kind == "RecursionError":
        raise Wrong(f"{subject} failed: {kind}{where}", "recursion")
    for pattern, hint in step.crashes.items():
        if re.search(pattern, text):
            raise Wrong(what, hint)
    for pattern, hint in sandbox.CRASHES.items():
        if re.search(pattern, f"{kind}: {text}"):
            raise Wrong(what, hint)
    if CONSEQUENCE.search(text):
        compare_calls(group, step)
    raise Wrong(what, "missing" if kind == "TypeError" and "argument" in text else "crash")


def _judge_exit(group: Group, step: Step, subject: str, status: int) -> None:
    """Raise `Wrong` for a rank that ended without a report."""
    reason = f"signal {-status}" if status < 0 else f"exit status {status}"
    compare_calls(group, step, absent=False)  # gloo aborts if the sizes do not match
    what = f"{subject} ended in the middle of the step ({reason})"
    hints = (hint for pattern, hint in step.crashes.items() if re.search(pattern, what))
    raise Wrong(what, next(hints, "killed"))


def _judge_stopped(group: Group, step: Step) -> None:
    """Raise `Wrong` for a group that had to be stopped, although no rank had an error."""
    waiting = [r for r, rank in enumerate(group.ranks) if rank.end == "waiting"]
    lines = [
        f"{f'rank {r}' if step.joins else 'it'} was in line {group.ranks[r].line}"
        for r in waiting
        if group.ranks[r].line
    ]
    pronoun = "it" if len(waiting) == 1 else "them"
    where = f": when the checker stopped {pronoun}, {' and '.join(lines)}" if lines else ""
    endless = Wrong(f"{_subject(step, *waiting)} did not end{where}", "endless")
    calls = [rank.calls[-1:] for rank in group.ranks if rank.is_busy]
    if any(not last or last[0].returned or last[0].asynchronous for last in calls):
        raise endless  # a rank computes outside of a collective, and others may wait for it
    if step.explain_hang is not None:
        step.explain_hang(group)
    try:
        compare_calls(group, step)
    except Wrong as wrong:
        raise Wrong(wrong.what + where, wrong.hint) from wrong
    blocked = [rank.calls[-1] for rank in group.ranks if rank.calls and rank.end == "waiting"]
    if blocked and not blocked[0].returned and not blocked[0].asynchronous:
        what = f"{_subject(step, *waiting)} did not return from {blocked[0].name}{where}"
        raise Wrong(what, "some_ranks")
    raise endless
