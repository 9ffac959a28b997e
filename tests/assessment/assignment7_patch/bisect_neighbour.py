"""Step 3: the last fast commit"""

STEP, HINT = 3, "wrong_commit"


def bisect(commits: list[str], measure: Callable[[str], float], slower: float) -> str:
    fast, slow = 0, len(commits) - 1
    while slow - fast > 1:
        middle = (fast + slow) // 2
        if min(measure(commits[middle]) for _ in range(3)) > slower:
            slow = middle
        else:
            fast = middle
    return commits[fast]
