"""Step 3: one commit after the other"""

STEP, HINT = 3, "too_many"


def bisect(commits: list[str], measure: Callable[[str], float], slower: float) -> str:
    return next(c for c in commits if min(measure(c) for _ in range(3)) > slower)
