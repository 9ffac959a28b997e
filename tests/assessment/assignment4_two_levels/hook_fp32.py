"""Step 3: sent as fp32"""

STEP, HINT = 3, "wire"


def bf16_hook(state: Feedback, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    gradient = bucket.buffer()
    gradient.div_(dist.get_world_size())
    work = dist.all_reduce(gradient, async_op=True)
    return work.get_future().then(lambda _: gradient)
