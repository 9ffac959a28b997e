"""Step 3: the sum, and not the mean"""

STEP, HINT = 3, "mean"


def bf16_hook(state: Feedback, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    wanted = bucket.buffer() + state.residual.get(bucket.index(), 0)
    sent = wanted.bfloat16()
    state.residual[bucket.index()] = wanted - sent.float()
    work = dist.all_reduce(sent, async_op=True)
    return work.get_future().then(lambda _: sent.float())
