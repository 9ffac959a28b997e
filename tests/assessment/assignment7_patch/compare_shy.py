"""Step 2: only a factor of ten counts"""

STEP, HINT = 2, "missed"


def compare(old: Callable, new: Callable, clock: Callable[[], float], rounds: int = 30):
    old(), new()

    def time(function: Callable) -> float:
        start = clock()
        function()
        return clock() - start

    ratios = [time(old) / time(new) for _ in range(rounds)]
    ratio = statistics.median(ratios)
    if 0.6 < ratio < 10:
        return "same", ratio
    return ("faster" if ratio > 1 else "slower"), ratio
