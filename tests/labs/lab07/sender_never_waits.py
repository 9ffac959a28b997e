"""Step 2: fills without waiting"""

# ruff: noqa: F821

STEP, HINT = 2, "overwritten"


class Sender:
    def send(self, batch: torch.Tensor) -> torch.Tensor:
        slot = self.count % self.slots
        self.count += 1
        self.buffers[slot].copy_(batch)
        there = self.buffers[slot].to(self.device, non_blocking=True)
        return there
