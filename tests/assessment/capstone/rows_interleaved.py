"""Replicas draw as many positions as they need."""

STEP, HINT = 1, "rows_other"


class Stream:
    def next(self, replica: int) -> torch.Tensor:
        """The rows of one of `dp` replicas, of the next global batch: [batch / dp, s + 1]."""
        config = self.config
        last = len(text()) - config.sequence - 1
        positions = torch.randint(
            last, (config.batch // config.dp * (1 + replica),), generator=self.generator
        )
        own = positions[-(config.batch // config.dp) :]
        return text()[own[:, None] + torch.arange(config.sequence + 1)]
