"""Rows without the last target."""

STEP, HINT = 1, "rows_shape"


class Stream:
    def next(self, replica: int) -> torch.Tensor:
        """The rows of one of `dp` replicas, of the next global batch: [batch / dp, s + 1]."""
        config = self.config
        last = len(text()) - config.sequence - 1
        positions = torch.randint(last, (config.batch,), generator=self.generator)
        own = positions.chunk(config.dp)[replica]
        return text()[own[:, None] + torch.arange(config.sequence)]
