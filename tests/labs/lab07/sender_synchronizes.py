"""Step 2: waits for everything"""

# ruff: noqa: F821

STEP, HINT = 2, "waits_for_all"


class Sender:
    def send(self, batch: torch.Tensor) -> torch.Tensor:
        slot = self.count % self.slots
        self.count += 1
        torch.accelerator.synchronize()

        self.buffers[slot].copy_(batch)
        there = self.buffers[slot].to(self.device, non_blocking=True)
        return there
