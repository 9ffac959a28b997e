"""Step 5: the mean of three runs"""

STEP, HINT = 5, "slow_run"


class Chooser:
    def choose(self, x: torch.Tensor, weight: torch.Tensor, candidates: list[Algorithm]):
        best, best_time = None, float("inf")
        for algorithm in [a for a in candidates if a.workspace <= self.limit]:
            if self.deterministic and not algorithm.deterministic:
                continue
            algorithm.run()
            start = self.clock()
            for _ in range(3):
                algorithm.run()
            if (time := self.clock() - start) < best_time:
                best, best_time = algorithm, time
        return best
