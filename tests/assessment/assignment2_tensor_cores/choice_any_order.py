"""Step 5: what is not deterministic is taken"""

STEP, HINT = 5, "nondeterministic"


class Chooser:
    def choose(self, x: torch.Tensor, weight: torch.Tensor, candidates: list[Algorithm]):
        best, best_time = None, float("inf")
        for algorithm in [a for a in candidates if a.workspace <= self.limit]:
            algorithm.run()
            start = self.clock()
            algorithm.run()
            if (time := self.clock() - start) < best_time:
                best, best_time = algorithm, time
        return best
