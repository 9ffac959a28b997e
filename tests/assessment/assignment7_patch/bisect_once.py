"""Step 3: one measurement of each"""

STEP, HINT = 3, "noisy_bisect"


def bisect(commits: list[str], measure: Callable[[str], float], slower: float) -> str:
    fast, slow = 0, len(commits) - 1
    while slow - fast > 1:
        middle = (fast + slow) // 2
        if measure(commits[middle]) > slower:
            slow = middle
        else:
            fast = middle
    return commits[slow]
