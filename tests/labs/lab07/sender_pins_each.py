"""Step 2: pins every batch"""

# ruff: noqa: F821

STEP, HINT = 2, "pins_each"


class Sender:
    def send(self, batch: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return batch.pin_memory().to(self.device, non_blocking=True)
