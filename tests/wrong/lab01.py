"""Wrong answers to labs/lab01_multi_gpu_setup.py."""

# fmt: off
from wrong import Body, Table

wrong = Table("labs/lab01_multi_gpu_setup.py")

# step 1

wrong("device_by_rank", step=1, hint="device_index", old=Body("pick_device"), new="""
    if torch.accelerator.device_count() >= local_world:
        rank = int(os.environ["RANK"])
        torch.accelerator.set_device_index(rank)
        return torch.device(torch.accelerator.current_accelerator().type, rank)
    return torch.device("cpu")
""")
wrong("device_cpu_always", step=1, hint="no_accelerator",
      old=Body("pick_device"), new='return torch.device("cpu")')
wrong("device_each_for_itself", step=1, hint="shared_device",
      old="torch.accelerator.device_count() >= local_world",
      new="local_rank < torch.accelerator.device_count()")
wrong("device_named", step=1, hint="not_a_device",
      old='return torch.device("cpu")', new='return "cpu"')
wrong("device_not_current", step=1, hint="not_current",
      old="torch.accelerator.set_device_index(local_rank)", new="")
wrong("device_shared", step=1, hint="shared_device",
      old="() and torch.accelerator.device_count() >= local_world", new="()")
wrong("device_without_index", step=1, hint="no_index",
      old="torch.device(torch.accelerator.current_accelerator().type, local_rank)",
      new="torch.accelerator.current_accelerator()")

# step 2

wrong("group_from_environment", step=2, hint="own_store",
      old=", store=store, rank=rank, world_size=world,", new=",")
wrong("group_gloo_always", step=2, hint="gloo_on_gpu",
      old='if device.type == "cpu":', new="if True:")
wrong("group_no_backend", step=2, hint="no_backend", old=Body("start_group"), new="""
    bound = None if device.type == "cpu" else device
    dist.init_process_group(
        store=store, rank=rank, world_size=world, timeout=timeout, device_id=bound
    )
""")
wrong("group_none", step=2, hint="not_joined",
      old=Body("start_group"), new="pass")
wrong("group_not_bound", step=2, hint="not_bound", old=Body("start_group"), new="""
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
""")
wrong("group_patient", step=2, hint="no_timeout", edits=[
    ('if device.type == "cpu":',
     'who = {"store": store, "rank": rank, "world_size": world}\nif device.type == "cpu":'),
    (", store=store, rank=rank, world_size=world, timeout=timeout", ", **who")])
wrong("start_bound_on_cpu", step=2, hint="bound_on_cpu", old=Body("start_group"), new="""
    dist.init_process_group(
        "gloo" if device.type == "cpu" else None,
        store=store,
        rank=rank,
        world_size=world,
        timeout=timeout,
        device_id=device,
    )
""")
wrong("group_timeout_fixed", step=2, hint="no_timeout", edits=[
    ('"gloo", store=store, rank=rank, world_size=world, timeout=timeout',
     '"gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)')])

# step 3

wrong("expected_everybody", step=3, hint="everybody",
      old="total if rank == root else None", new="total")
wrong("expected_nobody", step=3, hint="nobody",
      old='"all-reduce": total,', new='"all-reduce": total if rank == root else None,')
wrong("expected_not_summed", step=3, hint="not_summed",
      old="total if rank == root else None", new="table[rank] if rank == root else None")
wrong("expected_other_way_round", step=3, hint="neighbour",
      old="[(rank - 1) % world]", new="[(rank + 1) % world]")
wrong("expected_root_0", step=3, hint="root_fixed",
      old='"broadcast": table[root],', new='"broadcast": table[0],')
wrong("expected_rows", step=3, hint="transposed",
      old="table[:, rank]", new="table[rank]")
wrong("expected_sum_of_columns", step=3, hint="transposed",
      old="len(table), table.sum(dim=0)", new="len(table), table.sum(dim=1)")
wrong("expected_summed", step=3, hint="summed",
      old="table[:, rank]", new="table.sum(dim=1)")
wrong("expected_whole_row", step=3, hint="other_part",
      old="root, rank", new="root")
wrong("expected_whole_sum", step=3, hint="whole_sum",
      old="total[rank]", new="total")

# step 4

wrong("facts_flat", step=4, hint="facts_shape",
      old=Body("gather_facts"), new="return [mine]")
wrong("facts_for_the_root", step=4, hint="facts_root", edits=[
    ("everybody: list[dict] = [{} for _ in range(world)]",
     "everybody= [{}] * world if dist.get_rank() == 0 else None"),
    ("dist.all_gather_object(everybody, mine)", "dist.gather_object(mine, everybody, dst=0)")])
wrong("facts_mine_first", step=4, hint="facts_order", edits=[
    (": list[dict] = [{} for _ in range(world)]", "= [{}] * world"),
    ("return everybody", "rank = dist.get_rank()\nreturn everybody[rank:] + everybody[:rank]")])
wrong("facts_only_rank_0", step=4, hint="some_ranks", old=Body("gather_facts"), new="""
    everybody = [{}] * world
    if dist.get_rank() == 0:
        dist.all_gather_object(everybody, mine)
    return everybody
""")
wrong("facts_own", step=4, hint="facts_own",
      old=Body("gather_facts"), new="return [mine] * world")

# step 5

wrong("right_time_imported", step=5, edits=[
    ("import statistics", "import statistics\nfrom time import perf_counter"),
    ("settle()\nstart = time.perf_counter()", "settle()\nstart = perf_counter()"),
    ("append(time.perf_counter()", "append(perf_counter()")])
wrong("time_all_calls", step=5, hint="total", edits=[
    ("times = []", "settle()\nstart = time.perf_counter()"),
    ("settle()\nstart = time.perf_counter()", ""),
    ("""
            settle()
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    """, "settle()\nreturn time.perf_counter() - start")])
wrong("time_cold", step=5, hint="no_warm_up",
      old="for _ in range(warm_up):\n    work()", new="")
wrong("time_fastest", step=5, hint="minimum",
      old="return statistics.median(times)", new="return min(times)")
wrong("time_mean", step=5, hint="mean",
      old="return statistics.median(times)", new="return statistics.mean(times)")
wrong("time_mean_of_a_loop", step=5, hint="mean", edits=[
    ("times = []", "settle()\nstart = time.perf_counter()"),
    ("settle()\nstart = time.perf_counter()", ""),
    ("""
            settle()
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    """, "settle()\nreturn (time.perf_counter() - start) / repeats")])
wrong("time_milliseconds", step=5, hint="time_other",
      old="return statistics.median(times)", new="return 1000 * statistics.median(times)")
wrong("time_not_settled", step=5, hint="not_settled",
      old="work()\nsettle()", new="work()")
wrong("time_one_call_too_many", step=5, hint="calls",
      old="range(repeats)", new="range(repeats + 1)")
wrong("time_settled_late", step=5, hint="settled_late",
      old="for _ in range(repeats):\n    settle()", new="for _ in range(repeats):")

# step 6

wrong("bandwidth_in_gb", step=6, hint="units",
      old="algorithm = nbytes / seconds", new="algorithm = nbytes / seconds / 1e9")
wrong("bandwidth_no_factor", step=6, hint="no_factor",
      old="algorithm * 2 * (world - 1) / world", new="algorithm ")
wrong("bandwidth_once_around", step=6, hint="half_ring",
      old="algorithm * 2 * (world - 1)", new="algorithm * (world - 1)")
wrong("bandwidth_one_number", step=6, hint="pair",
      old=Body("bus_bandwidth"), new="return nbytes / seconds * 2 * (world - 1) / world")
wrong("bandwidth_per_rank", step=6, hint="bus_other",
      old="algorithm * 2 * (world - 1)", new="algorithm ")
wrong("bandwidth_whole_messages", step=6, hint="factor_n",
      old="algorithm * 2 * (world - 1) / world", new="algorithm * 2 * (world - 1)")

# step 7

wrong("links_always_3", step=7, hint="factor_fixed",
      old="link.latency > factor * latency or link.bandwidth < bandwidth / factor",
      new="link.latency > 3 * latency or link.bandwidth < bandwidth / 3")
wrong("links_backwards", step=7, hint="links_other",
      old="return slow", new="return slow[::-1]")
wrong("links_bandwidth_alone", step=7, hint="no_latency", old="""
    latency = statistics.median(other.latency for other in kin)
    bandwidth = statistics.median(other.bandwidth for other in kin)
    if link.latency > factor * latency or link.bandwidth < bandwidth / factor:
""", new="if link.bandwidth < statistics.median(other.bandwidth for other in kin) / factor:")
wrong("links_fast", step=7, hint="fast_links",
      old="link.bandwidth < bandwidth / factor", new="link.bandwidth > factor * bandwidth")
wrong("links_latency_alone", step=7, hint="no_bandwidth",
      old="link.latency > factor * latency or link.bandwidth < bandwidth / factor",
      new="link.latency > factor * statistics.median(other.latency for other in kin)")
wrong("links_mean", step=7, hint="mean_link",
      old="statistics.median(other.latency for other in kin)",
      new="statistics.mean(other.latency for other in kin)")
wrong("links_of_all_kinds", step=7, hint="all_kinds",
      old="(other.latency for other in kin)", new="(other.latency for other in links)")

# step 8

wrong("exchange_by_collective", step=8, hint="no_collective",
      old=Body("exchange_metadata"),
      new='texts = [""] * world\ndist.all_gather_object(texts, mine)\nreturn texts')
wrong("exchange_by_own_group", step=8, hint="no_collective",
      old=Body("exchange_metadata"), new="""
    if not dist.is_initialized():
        meeting = dist.PrefixStore("meeting", store)
        dist.init_process_group("gloo", store=meeting, rank=rank, world_size=world)
    texts = [""] * world
    dist.all_gather_object(texts, mine)
    return texts
""")
wrong("exchange_bytes", step=8, hint="bytes",
      old='store.get(f"{call}/{other}").decode()', new='store.get(f"{call}/{other}")')
wrong("exchange_gives_up", step=8, hint="gave_up",
      old='[f"{call}/{other}"]', new='[f"{call}/{other}" for other in range(world)]')
wrong("exchange_one_key", step=8, hint="one_key", edits=[
    ('f"{call}/{rank}"', "call"),
    ("texts: list[str | None] = []", "texts = []"),
    ('[f"{call}/{other}"]', "[call]"),
    ('(f"{call}/{other}")', "(call)")])
wrong("exchange_patient", step=8, hint="endless_wait",
      old='store.wait([f"{call}/{other}"], timeout)', new="")
wrong("exchange_silent", step=8, hint="not_told",
      old=Body("exchange_metadata"), new="return [mine] + [None] * (world - 1)")
wrong("exchange_stale", step=8, hint="stale", edits=[
    ('f"{call}/{rank}"', 'f"{rank}"'),
    ('[f"{call}/{other}"]', '[f"{other}"]'),
    ('(f"{call}/{other}")', '(f"{other}")')])
wrong("exchange_waits_for_ever", step=8, hint="endless_wait",
      old=Body("exchange_metadata"), new="""
    store.set(f"{call}/{rank}", mine)
    return [store.get(f"{call}/{other}").decode() for other in range(world)]
""")
wrong("right_exchange_that_asks_again", step=8, edits=[
    ("store.wait([f\"{call}/{other}\"], timeout)", """
    late = time.monotonic() + timeout.total_seconds()
    while not store.check([f"{call}/{other}"]):
        time.sleep(0.05)
        if time.monotonic() > late:
            raise dist.DistStoreError
""")])
wrong("right_exchange_under_a_prefix", step=8, old="""
    store.set(f"{call}/{rank}", mine)
    texts: list[str | None] = []
""", new="""
    store = dist.PrefixStore(call, store)
    store.set(f"{call}/{rank}", mine)
    texts: list[str | None] = []
""")
