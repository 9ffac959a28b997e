"""Step 2: the mean of the ratios"""

STEP, HINT = 2, "outlier"


def compare(old: Callable, new: Callable, clock: Callable[[], float], rounds: int = 30):
    old(), new()

    def time(function: Callable) -> float:
        start = clock()
        function()
        return clock() - start

    ratios = [time(old) / time(new) for _ in range(rounds)]
    ratio = statistics.fmean(ratios)
    agree = max(sum(r > 1 for r in ratios), sum(r < 1 for r in ratios)) >= 0.9 * rounds
    if not agree or abs(ratio - 1) < 0.02:
        return "same", ratio
    return ("faster" if ratio > 1 else "slower"), ratio
