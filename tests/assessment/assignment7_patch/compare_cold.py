"""Step 2: the first calls count"""

STEP, HINT = 2, "cold"


def compare(old: Callable, new: Callable, clock: Callable[[], float], rounds: int = 30):
    rounds = 1

    def time(function: Callable) -> float:
        start = clock()
        function()
        return clock() - start

    ratios = [time(old) / time(new) for _ in range(rounds)]
    ratio = statistics.median(ratios)
    return "same" if ratio == 1 else "faster" if ratio > 1 else "slower", ratio
    return ("faster" if ratio > 1 else "slower"), ratio
