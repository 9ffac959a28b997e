"""Step 5: the limit is not looked at"""

STEP, HINT = 5, "workspace"


class Chooser:
    def choose(self, x: torch.Tensor, weight: torch.Tensor, candidates: list[Algorithm]):
        best, best_time = None, float("inf")
        for algorithm in candidates:
            algorithm.run()
            start = self.clock()
            algorithm.run()
            if (time := self.clock() - start) < best_time:
                best, best_time = algorithm, time
        return best
