"""Step 2: first all of old, then all of new"""

STEP, HINT = 2, "order"


def compare(old: Callable, new: Callable, clock: Callable[[], float], rounds: int = 30):
    old(), new()

    def time(function: Callable) -> float:
        start = clock()
        function()
        return clock() - start

    olds = [time(old) for _ in range(rounds)]
    ratios = [o / time(new) for o in olds]
    ratio = statistics.median(ratios)
    agree = max(sum(r > 1 for r in ratios), sum(r < 1 for r in ratios)) >= 0.9 * rounds
    if not agree or abs(ratio - 1) < 0.02:
        return "same", ratio
    return ("faster" if ratio > 1 else "slower"), ratio
