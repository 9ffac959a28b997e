"""Wrong answers to labs/lab02_ddp.py, each with the hint that it must get.

An entry without a hint is a right answer that is written in a different way.
"""

# fmt: off
from wrong import Body, Table

wrong = Table("labs/lab02_ddp.py")

# step 1

wrong("start_cpu_always", step=1, hint="no_accelerator",
      old=Body("start"), new='dist.init_process_group("gloo")\nreturn torch.device("cpu")')
wrong("start_nccl", step=1, hint="no_gpu", old=Body("start"), new="""
    dist.init_process_group("nccl")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
""")
wrong("start_no_device", step=1, hint="not_a_device",
      old=Body("start"), new='dist.init_process_group("gloo")\nreturn "cpu"')
wrong("start_nothing", step=1, hint="not_joined",
      old=Body("start"), new='return torch.device("cpu")')
wrong("start_rank_for_local_rank", step=1, hint="device_index", edits=[
    ('local_rank, local_world = int(os.environ["LOCAL_RANK"])',
     'rank, local_world = int(os.environ["RANK"])'),
    ("""
        device = torch.device(torch.accelerator.current_accelerator().type, local_rank)
        torch.accelerator.set_device_index(local_rank)
    """, "device = torch.device(torch.accelerator.current_accelerator().type, rank)")])
wrong("start_shares_a_device", step=1, hint="shared_device",
      old="() and torch.accelerator.device_count() >= local_world", new="()")

# step 2

wrong("shard_drops_the_rest", step=2, hint="dropped",
      old="order[rank::world]", new="order[: length // world * world][rank::world]")
wrong("shard_ignores_epoch", step=2, hint="epoch_ignored",
      old="generator = torch.Generator().manual_seed(epoch)",
      new="generator = torch.Generator().manual_seed(0)")
wrong("shard_overlaps", step=2, hint="overlap", old=Body("shard"), new="""
    order = torch.randperm(length, generator=torch.Generator().manual_seed(epoch)).tolist()
    share = -(-length // world)
    return order[rank : rank + share]
""")
wrong("shard_invents_indices", step=2, hint="no_such_index",
      old="order += order[:missing]", new="order += range(length, length + missing)")
wrong("shard_own_seed", step=2, hint="overlap",
      old="generator = torch.Generator().manual_seed(epoch)",
      new="generator = torch.Generator().manual_seed(epoch + rank)")
wrong("shard_same_for_all", step=2, hint="same_shard",
      old="order[rank::world]", new="order[0::world]")
wrong("shard_tensor", step=2, hint="not_a_list", old=Body("shard"), new="""
    order = torch.randperm(length, generator=torch.Generator().manual_seed(epoch))
    return torch.cat([order, order[: -length % world]])[rank::world]
""")
wrong("shard_uneven", step=2, hint="uneven",
      old="order += order[:missing]", new="")
wrong("shard_unseeded", step=2, hint="unseeded", old=Body("shard"), new="""
    torch.seed()
    order = torch.randperm(length).tolist()
    order += order[: -length % world]
    return order[rank::world]
""")

# step 3

wrong("broadcast_copies", step=3, hint="not_broadcast",
      old="detach(), src", new="clone(), src")
wrong("broadcast_last_rank", step=3, hint="other_source",
      old=".detach(), src=0", new=", src=dist.get_world_size() - 1")
wrong("broadcast_no_buffers", step=3, hint="buffers", old=Body("broadcast_state"), new="""
    for parameter in module.parameters():
        dist.broadcast(parameter.detach(), src=0)
""")
wrong("broadcast_no_frozen", step=3, hint="frozen", old=Body("broadcast_state"), new="""
    for parameter in module.parameters():
        if parameter.requires_grad:
            dist.broadcast(parameter.detach(), src=0)
    for buffer in module.buffers():
        dist.broadcast(buffer, src=0)
""")
wrong("broadcast_nothing", step=3, hint="not_broadcast",
      old=Body("broadcast_state"),
      new="for tensor in module.state_dict().values():\n    tensor.clone()")
wrong("broadcast_only_rank_0", step=3, hint="some_ranks", old=Body("broadcast_state"), new="""
    if dist.get_rank() == 0:
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, src=0)
""")
wrong("broadcast_own_source", step=3, hint="own_source",
      old=".detach(), src=0", new=", src=dist.get_rank()")

# step 4

wrong("average_divided_twice", step=4, hint="divided_twice",
      old="if parameter.grad is not None:",
      new="if parameter.grad is not None:\n    parameter.grad /= dist.get_world_size()")
wrong("average_none_gradient", step=4, hint="none_gradient", old="""
    if parameter.grad is not None:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
""", new="parameter.grad /= dist.get_world_size()\ndist.all_reduce(parameter.grad)")
wrong("average_not_divided", step=4, hint="not_divided",
      old="dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size()",
      new="dist.all_reduce(parameter.grad)")
wrong("average_not_waited", step=4, hint="not_waited",
      old="dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size()",
      new="dist.all_reduce(parameter.grad, dist.ReduceOp.SUM, None, True)")
wrong("average_nothing", step=4, hint="not_reduced",
      old="dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size()",
      new="parameter.grad *= 1")
wrong("average_only_rank_0", step=4, hint="some_ranks",
      old="grad is not None", new="grad is not None and dist.get_rank() == 0")
wrong("average_reduces_a_copy", step=4, hint="copy_reduced",
      old="dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size()",
      new="copy = parameter.grad.clone()\ndist.all_reduce(copy)\ncopy /= dist.get_world_size()")
wrong("right_average_polled", step=4, old="dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size()", new="""
    work = dist.all_reduce(parameter.grad, dist.ReduceOp.SUM, None, True)
    while not work.is_completed():
        pass
    parameter.grad /= dist.get_world_size()
""")
wrong("average_weights_only", step=4, hint="subset",
      old="grad is not None", new="grad is not None and parameter.dim() > 1")

# step 5

wrong("hooks_all_in_finish", step=5, hint="not_early", edits=[
    ("(parameter, dist.all_reduce(parameter.grad, async_op=True))", "parameter"),
    ("for parameter, work in self.started:\n    work.wait()",
     "for parameter in self.started:\n    dist.all_reduce(parameter.grad)")])
wrong("hooks_divide_in_flight", step=5, hint="touched",
      old="self.started.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))",
      new="""
    self.started.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))
    parameter.grad /= dist.get_world_size()
""")
wrong("hooks_first_step_only", step=5, hint="first_step_only", edits=[
    (Body("HookDDP.start"), """
        if len(self.started) < len([p for p in self.module.parameters() if p.requires_grad]):
            self.started.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))
    """),
    (Body("HookDDP.finish"), """
        for parameter, work in self.started:
            if not getattr(work, "seen", False):
                work.seen = True
                work.wait()
                parameter.grad /= dist.get_world_size()
    """)])
wrong("hooks_never_forgotten", step=5, hint="not_forgotten",
      old="self.started.clear()", new="")
wrong("hooks_not_divided", step=5, hint="not_divided",
      old=Body("HookDDP.finish"),
      new="for _, work in self.started:\n    work.wait()\nself.started.clear()")
wrong("hooks_not_waited", step=5, hint="not_waited",
      old=Body("HookDDP.finish"),
      new="for parameter, _ in self.started:\n    parameter.grad.mul_(1)\nself.started.clear()")
wrong("hooks_on_frozen", step=5, hint="frozen_hook",
      old="if parameter.requires_grad:", new="if True:")
wrong("hooks_on_weights_only", step=5, hint="subset", old=Body("HookDDP.start"), new="""
    if parameter.dim() > 1:
        self.started.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))
""")
wrong("hooks_synchronous", step=5, hint="synchronous",
      old="self.started.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))",
      new="dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size()")
wrong("hooks_without_broadcast", step=5, hint="no_initial_broadcast",
      old="self.started: list[tuple[nn.Parameter, dist.Work]] = []\nbroadcast_state(module)",
      new="self.started = []")
wrong("hooks_wait_for_biases", step=5, hint="synchronous",
      old="self.started.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))",
      new="""
    started = dist.all_reduce(parameter.grad, async_op=parameter.dim() > 1)
    if started is None:
        parameter.grad /= dist.get_world_size()
    else:
        self.started.append((parameter, started))
""")
wrong("right_hooks_by_futures", step=5, old="work.wait()\nparameter.grad /= dist.get_world_size()",
      new="work.get_future().wait()\nparameter.grad /= dist.get_world_size()")

# step 6

wrong("buckets_copied_out", step=6, hint="not_views", edits=[
    (Body("BucketDDP.keep_in_bucket"),
     "self.bucket_of[parameter].views[parameter].copy_(parameter.grad)"),
    (Body("BucketDDP.finish"), """
        for bucket in self.buckets:
            bucket.work.wait()
            bucket.flat /= dist.get_world_size()
            for parameter, view in bucket.views.items():
                parameter.grad.copy_(view)
        self.begin()
    """)])
wrong("buckets_count_numbers", step=6, hint="bucket_size", edits=[
    ("if not groups or parameter.nbytes > room:",
     "size = parameter.numel()\nif not groups or size > room:"),
    ("room -= parameter.nbytes", "room -= size")])
wrong("buckets_divided_twice", step=6, hint="divided_twice",
      old="bucket.flat /= dist.get_world_size()", new="""
    bucket.flat /= dist.get_world_size()
    for parameter in bucket.views:
        parameter.grad /= dist.get_world_size()
""")
wrong("buckets_front_first", step=6, hint="fill_order",
      old="reversed(parameters)", new="parameters")
wrong("buckets_no_views", step=6, hint="not_views",
      old="piece.view_as(p)", new="piece.view_as(p).clone()")
wrong("buckets_not_kept", step=6, hint="copy_reduced",
      old=Body("BucketDDP.keep_in_bucket"), new="pass")
wrong("buckets_not_waited", step=6, hint="not_waited",
      old=Body("BucketDDP.finish"), new="self.begin()")
wrong("buckets_one_at_a_time", step=6, hint="one_launch", old="""
    while self.launched < len(self.buckets) and not self.buckets[self.launched].waiting:
        bucket = self.buckets[self.launched]
""", new="bucket = self.buckets[self.launched]\nif not bucket.waiting:")
wrong("buckets_reallocated", step=6, hint="reallocated",
      old=Body("BucketDDP.keep_in_bucket"), new="""
    if not hasattr(parameter, "was_kept"):
        view = self.bucket_of[parameter].views[parameter]
        view.copy_(parameter.grad)
        parameter.grad, parameter.was_kept = view, True
""")
wrong("buckets_when_ready", step=6, hint="launch_order",
      old=Body("BucketDDP.launch_in_order"), new="""
    bucket = self.bucket_of[parameter]
    bucket.waiting.discard(parameter)
    if not bucket.waiting:
        bucket.work = dist.all_reduce(bucket.flat, async_op=True)
        self.launched += 1
""")

# step 7

wrong("accumulate_all_silent", step=7, hint="not_reenabled", old=Body("accumulate"), new="""
    with ddp.no_sync():
        for micro_batch in micro_batches:
            (loss_of(ddp, micro_batch) / len(micro_batches)).backward()
    ddp.finish()
""")
wrong("accumulate_always_sends", step=7, hint="no_sync_unused", old=Body("accumulate"), new="""
    for micro_batch in micro_batches:
        (loss_of(ddp, micro_batch) / len(micro_batches)).backward()
        ddp.finish()
""")
wrong("accumulate_divided_by_ranks", step=7, hint="loss_wrong", old=Body("accumulate"), new="""
    *silent, last = micro_batches
    with ddp.no_sync():
        for micro_batch in silent:
            (loss_of(ddp, micro_batch) / dist.get_world_size()).backward()
    (loss_of(ddp, last) / dist.get_world_size()).backward()
    ddp.finish()
""")
wrong("accumulate_last_only", step=7, hint="micro_batch_lost", old=Body("accumulate"), new="""
    *silent, last = micro_batches
    with ddp.no_sync():
        for micro_batch in silent:
            loss_of(ddp, micro_batch)
    (loss_of(ddp, last) / len(micro_batches)).backward()
    ddp.finish()
""")
wrong("accumulate_not_divided", step=7, hint="loss_not_divided", old=Body("accumulate"), new="""
    *silent, last = micro_batches
    with ddp.no_sync():
        for micro_batch in silent:
            loss_of(ddp, micro_batch).backward()
    loss_of(ddp, last).backward()
    ddp.finish()
""")
wrong("no_sync_sends", step=7, hint="no_sync_sends",
      old="if self.sync:", new="if True:")
wrong("no_sync_stays", step=7, hint="not_reenabled",
      old=Body("AccumulatingDDP.no_sync"), new="self.sync = False\nyield")
wrong("no_sync_without_finally", step=7, hint="not_restored",
      old=Body("AccumulatingDDP.no_sync"), new="""
        before, self.sync = self.sync, False
        yield
        self.sync = before
""")

wrong("no_sync_ends_the_outer", step=7, hint="nested",
      old="            self.sync = before", new="            self.sync = True")

# step 8

wrong("torch_all_silent", step=8, hint="all_silent",
      old=Body("accumulate_with_torch"), new="""
    with ddp.no_sync():
        for micro_batch in micro_batches:
            (loss_of(ddp, micro_batch) / len(micro_batches)).backward()
""")
wrong("torch_always_sends", step=8, hint="forward_outside",
      old=Body("accumulate_with_torch"), new="""
    for micro_batch in micro_batches:
        (loss_of(ddp, micro_batch) / len(micro_batches)).backward()
""")
wrong("torch_forward_outside", step=8, hint="forward_outside",
      old=Body("accumulate_with_torch"), new="""
    *silent, last = micro_batches
    for micro_batch in silent:
        loss = loss_of(ddp, micro_batch) / len(micro_batches)
        with ddp.no_sync():
            loss.backward()
    (loss_of(ddp, last) / len(micro_batches)).backward()
""")
wrong("torch_no_bucket_view", step=8, hint="not_bucket_view",
      old=Body("wrap"), new="return DistributedDataParallel(module)")
wrong("torch_not_divided", step=8, hint="loss_not_divided",
      old=Body("accumulate_with_torch"), new="""
    *silent, last = micro_batches
    with ddp.no_sync():
        for micro_batch in silent:
            loss_of(ddp, micro_batch).backward()
    loss_of(ddp, last).backward()
""")
wrong("torch_not_wrapped", step=8, hint="not_torch",
      old=Body("wrap"), new="return module")
