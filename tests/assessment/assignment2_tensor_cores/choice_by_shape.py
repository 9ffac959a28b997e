"""Step 5: shapes alone are the key"""

STEP, HINT = 5, "key"


class Chooser:
    def choose(self, x: torch.Tensor, weight: torch.Tensor, candidates: list[Algorithm]):
        key = (x.shape, weight.shape)
        if key in self.chosen:
            return self.chosen[key]
        best, best_time = None, float("inf")
        for algorithm in candidates:
            if algorithm.workspace > self.limit:
                continue
            if self.deterministic and not algorithm.deterministic:
                continue
            algorithm.run()
            for _ in range(3):
                start = self.clock()
                algorithm.run()
                if (time := self.clock() - start) < best_time:
                    best, best_time = algorithm, time
        self.chosen[key] = best
        return best
