"""Step 3: one residual for all buckets"""

STEP, HINT = 3, "shared"


def bf16_hook(state: Feedback, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    world, gradient = dist.get_world_size(), bucket.buffer()
    wanted = gradient + state.residual.get(0, 0)
    sent = (wanted / world).bfloat16()
    state.residual[0] = wanted - sent.float() * world
    work = dist.all_reduce(sent, async_op=True)
    return work.get_future().then(lambda _: sent.float())
