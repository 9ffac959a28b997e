"""Step 3: what was sent is not multiplied again"""

STEP, HINT = 3, "feedback_scale"


def bf16_hook(state: Feedback, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    world, gradient = dist.get_world_size(), bucket.buffer()
    wanted = gradient + state.residual.get(bucket.index(), 0)
    sent = (wanted / world).bfloat16()
    state.residual[bucket.index()] = wanted - sent.float()
    work = dist.all_reduce(sent, async_op=True)
    return work.get_future().then(lambda _: sent.float())
