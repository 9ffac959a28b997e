"""Step 3: nothing is kept"""

STEP, HINT = 3, "no_feedback"


def bf16_hook(state: Feedback, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    sent = (bucket.buffer() / dist.get_world_size()).bfloat16()
    work = dist.all_reduce(sent, async_op=True)
    return work.get_future().then(lambda _: sent.float())
