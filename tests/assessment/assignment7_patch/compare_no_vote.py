"""Step 2: the median alone decides"""

STEP, HINT = 2, "noise"


def compare(old: Callable, new: Callable, clock: Callable[[], float], rounds: int = 30):
    old(), new()

    def time(function: Callable) -> float:
        start = clock()
        function()
        return clock() - start

    ratios = [time(old) / time(new) for _ in range(rounds)]
    ratio = statistics.median(ratios)
    if abs(ratio - 1) < 0.001:
        return "same", ratio
    return ("faster" if ratio > 1 else "slower"), ratio
