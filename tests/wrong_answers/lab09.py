"""Wrong answers to labs/lab09_multi_node.py."""

# fmt: off
from wrong_answers import Body, Table

wrong = Table("labs/lab09_multi_node.py")

# step 1

wrong("static_all_ranks_here", step=1, hint="nproc",
      old='f"--node-rank={node}",\nf"--nproc-per-node={ranks}",',
      new='f"--node-rank={node}",\nf"--nproc-per-node={nodes * ranks}",')
wrong("static_localhost", step=1, hint="master_localhost",
      old='f"--master-addr={master}"', new='"--master-addr=localhost"')
wrong("static_misspelt", step=1, hint="not_an_option",
      old='f"--nnodes={nodes}"', new='f"--num-nodes={nodes}"')
wrong("static_nnodes_are_ranks", step=1, hint="nnodes",
      old='f"--nnodes={nodes}"', new='f"--nnodes={nodes * ranks}"')
wrong("static_no_node_rank", step=1, hint="node_rank",
      old='f"--node-rank={node}",', new="")
wrong("static_one_string", step=1, hint="words_kind", old=Body("static_words"), new="""
    return (
        f"--nnodes={nodes} --node-rank={node} --nproc-per-node={ranks}"
        f" --master-addr={master} --master-port={port}"
    )
""")
wrong("static_own_name", step=1, hint="master",
      old='f"--master-addr={master}"', new='f"--master-addr=node{node}"')
wrong("static_own_port", step=1, hint="port",
      old='f"--master-port={port}"', new='f"--master-port={port + node}"')
wrong("static_rank_for_node_rank", step=1, hint="node_rank_of_rank",
      old='f"--node-rank={node}"', new='f"--node-rank={node * ranks}"')
wrong("right_static_spelt_otherwise", step=1,
      old='f"--nnodes={nodes}",\nf"--node-rank={node}",\nf"--nproc-per-node={ranks}",',
      new='"--nnodes",\nf"{nodes}:{nodes}",\nf"--node_rank={node}",\nf"--nproc_per_node={ranks}",')
wrong("static_standalone", step=1, hint="standalone",
      old='f"--nnodes={nodes}"', new='"--standalone",\n        f"--nnodes={nodes}"')
wrong("static_with_rdzv", step=1, hint="static_elastic",
      old='f"--master-port={port}",',
      new='f"--master-port={port}",\n        "--rdzv-backend=c10d",')
wrong("right_static_by_name", step=1,
      old='f"--master-port={port}",',
      new='f"--master-port={port}",\n        "--rdzv-backend=static",')
wrong("static_blanks", step=1, hint="words_kind",
      old='f"--nnodes={nodes}"', new='f"--nnodes {nodes}"')

# step 2

wrong("socket_address", step=2, hint="socket_address",
      old="name = max(leads, key=lambda name: networks[name].prefixlen)", new="""
    name = max(leads, key=lambda name: networks[name].prefixlen)
    name = interfaces[name].split("/")[0]
""")
wrong("socket_any_if_none", step=2, hint="socket_lookup", old="""
    if not leads:
        raise LookupError(f"no interface leads to {peer}")
    name = max(leads, key=lambda name: networks[name].prefixlen)
""", new="name = max(leads or interfaces, key=lambda name: networks[name].prefixlen)")
wrong("socket_eth0", step=2, hint="socket_fixed",
      old=Body("socket_variables"),
      new='name = "eth0"\nreturn {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}')
wrong("socket_first", step=2, hint="socket_first", old=Body("socket_variables"), new="""
    name = [*(name for name in interfaces if name != "lo"), "lo"][0]
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
""")
wrong("socket_first_that_leads", step=2, hint="socket_longest",
      old="max(leads, key=lambda name: networks[name].prefixlen)", new="leads[0]")
wrong("socket_gloo_alone", step=2, hint="socket_both",
      old="name = max(leads, key=lambda name: networks[name].prefixlen)", new="""
    return {"GLOO_SOCKET_IFNAME": max(leads, key=lambda name: networks[name].prefixlen)}
""")
wrong("socket_loopback", step=2, hint="socket",
      old=Body("socket_variables"),
      new='name = "lo"\nreturn {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}')
wrong("socket_next_of_none", step=2, hint="socket_lookup", old=Body("socket_variables"), new="""
    networks = {name: ipaddress.ip_interface(text).network for name, text in interfaces.items()}
    longest = sorted(networks, key=lambda name: -networks[name].prefixlen)
    name = next(name for name in longest if ipaddress.ip_address(peer) in networks[name])
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
""")
wrong("right_socket_exactly", step=2,
      old='"NCCL_SOCKET_IFNAME": name', new='"NCCL_SOCKET_IFNAME": f"={name}"')
wrong("socket_text", step=2, hint="socket_text", old=Body("socket_variables"), new="""
    start = peer.rpartition(".")[0]
    found = [name for name, text in interfaces.items() if text.startswith(start)]
    name = (found + [name for name in interfaces if name != "lo"])[0]
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
""")
wrong("socket_last_that_leads", step=2, hint="socket_longest",
      old="max(leads, key=lambda name: networks[name].prefixlen)", new="leads[-1]")
wrong("socket_name", step=2, hint="socket_kind",
      old='return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}', new="return name")
wrong("socket_network", step=2, hint="socket_host_bits",
      old="ipaddress.ip_interface(text).network for", new="ipaddress.ip_network(text) for")
wrong("socket_not_lo", step=2, hint="socket_leads",
      old="in net]", new='in net and name != "lo"]')
wrong("socket_two_names", step=2, hint="socket_same",
      old='"NCCL_SOCKET_IFNAME": name}', new='"NCCL_SOCKET_IFNAME": "eth"}')

# step 3

wrong("groups_first", step=3, hint="groups_kept",
      old="inner[rank // ranks], outer[rank % ranks]", new="inner[0], outer[0]")
wrong("groups_own_only", step=3, hint="groups_by_all", old=Body("make_groups"), new="""
    node, place = divmod(dist.get_rank(), ranks)
    inner = dist.new_group([node * ranks + r for r in range(ranks)])
    return inner, dist.new_group([n * ranks + place for n in range(nodes)])
""")
wrong("groups_round_robin", step=3, hint="groups_neighbours",
      old="[n * ranks + r for r in range(ranks)]", new="list(range(n, nodes * ranks, nodes))")
wrong("groups_swapped", step=3, hint="groups_swapped",
      old="inner[rank // ranks], outer[rank % ranks]",
      new="outer[rank % ranks], inner[rank // ranks]")
wrong("groups_two_by_two", step=3, hint="groups_counts", old=Body("make_groups"), new="""
    rank = dist.get_rank()
    inner = [dist.new_group([n * 2 + r for r in range(2)]) for n in range(nodes * ranks // 2)]
    outer = [dist.new_group(list(range(r, nodes * ranks, 2))) for r in range(2)]
    return inner[rank // 2], outer[rank % 2]
""")
wrong("groups_all", step=3, hint="groups_pair",
      old="return inner[rank // ranks], outer[rank % ranks]", new="return inner, outer")
wrong("groups_divided_by_nodes", step=3, hint="groups_index",
      old="return inner[rank // ranks], outer[rank % ranks]",
      new="return inner[rank // nodes], outer[rank % nodes]")

# step 4

wrong("crossing_all_ranks", step=4, hint="outer_all_ranks",
      old=Body("hierarchical_crossing"),
      new="return 2 * (nodes * ranks - 1) / (nodes * ranks) * size")
wrong("crossing_nothing", step=4, hint="bytes_kind",
      old=Body("hierarchical_crossing"), new="print(2 * (nodes - 1) / nodes * size)")
wrong("crossing_one_ring", step=4, hint="outer_one",
      old=Body("hierarchical_crossing"), new="return 2 * (nodes - 1) / nodes * size / ranks")
wrong("crossing_size", step=4, hint="outer",
      old=Body("hierarchical_crossing"), new="return size")
wrong("crossing_whole", step=4, hint="outer_whole",
      old="(size / ranks)", new="size")
wrong("flat_every_rank", step=4, hint="flat_every_rank",
      old="2 * (nodes * ranks - 1)", new="ranks * 2 * (nodes * ranks - 1)")
wrong("flat_once", step=4, hint="half_ring",
      old="2 * (nodes * ranks - 1)", new="(nodes * ranks - 1)")
wrong("flat_over_nodes", step=4, hint="flat_nodes",
      old=Body("flat_crossing"), new="return 2 * (nodes - 1) / nodes * size")
wrong("flat_twice_the_size", step=4, hint="flat",
      old=Body("flat_crossing"), new="return 2 * size")
wrong("flat_inside", step=4, hint="flat_ranks",
      old=Body("flat_crossing"), new="return 2 * (ranks - 1) / ranks * size")

# step 5

wrong("hierarchical_copies", step=5, hint="not_in_place",
      old="list(tensor.chunk(dist.get_world_size(inner)))",
      new="[piece.clone() for piece in tensor.chunk(dist.get_world_size(inner))]")
wrong("hierarchical_inside", step=5, hint="inside_only",
      old=Body("hierarchical_all_reduce"), new="dist.all_reduce(tensor, group=inner)")
wrong("hierarchical_leader", step=5, hint="leader", old=Body("hierarchical_all_reduce"), new="""
    dist.reduce(tensor, group=inner, group_dst=0)
    if dist.get_rank(inner) == 0:
        dist.all_reduce(tensor, group=outer)
    dist.broadcast(tensor, group=inner, group_src=0)
""")
wrong("hierarchical_mean", step=5, hint="hierarchical",
      old="dist.all_reduce(mine, group=outer)",
      new="dist.all_reduce(mine, group=outer)\nmine /= dist.get_world_size()")
wrong("hierarchical_not_gathered", step=5, hint="no_gather",
      old="dist.all_gather(pieces, mine, group=inner)",
      new="pieces[dist.get_rank(inner)].copy_(mine)")
wrong("hierarchical_twice", step=5, hint="twice",
      old=Body("hierarchical_all_reduce"),
      new="dist.all_reduce(tensor, group=inner)\ndist.all_reduce(tensor)")
wrong("hierarchical_whole", step=5, hint="whole_crosses",
      old=Body("hierarchical_all_reduce"),
      new="dist.all_reduce(tensor, group=inner)\ndist.all_reduce(tensor, group=outer)")
wrong("hierarchical_flat_functional", step=5, hint="still_flat",
      old=Body("hierarchical_all_reduce"), new="""
    from torch.distributed._functional_collectives import all_reduce
    tensor.copy_(all_reduce(tensor, "sum", dist.group.WORLD))
""")
wrong("hierarchical_for_two_nodes", step=5, hint="only_two",
      old="dist.all_reduce(mine, group=outer)", new="""
    other, peer = torch.empty_like(mine), (dist.get_rank(outer) + 1) % outer.size()
    sending = dist.isend(mine, group=outer, group_dst=peer)
    dist.recv(other, group=outer, group_src=(dist.get_rank(outer) - 1) % outer.size())
    sending.wait()
    mine = mine + other
""")
wrong("hierarchical_outer_pieces", step=5, hint="pieces_number",
      old="tensor.chunk(dist.get_world_size(inner))",
      new="tensor.chunk(dist.get_world_size(outer))")
wrong("hierarchical_without_wait", step=5, hint="not_waited",
      old="dist.all_reduce(mine, group=outer)",
      new="dist.all_reduce(mine, group=outer, async_op=True)")

# step 6

wrong("order_fixed", step=6, hint="order_fixed",
      old=Body("axis_order"),
      new='return [axis for axis in ("pp", "dp", "tp") if axis in sent]')
wrong("order_most_first", step=6, hint="order_reversed",
      old="key=sent.get", new="key=sent.get, reverse=True")
wrong("traffic_all_layers", step=6, hint="tp_layers",
      old="4 * layers / pp", new="4 * layers")
wrong("traffic_attention_only", step=6, hint="traffic",
      old="12 * hidden**2", new="4 * hidden**2")
wrong("traffic_forward_only", step=6, hint="tp_forward",
      old="4 * layers", new="2 * layers")
wrong("traffic_numbers", step=6, hint="width",
      old="tokens * hidden * width", new="tokens * hidden")
wrong("traffic_pp_always_two", step=6, hint="pp_ends",
      old="min(pp - 1, 2) * activation", new="2 * activation")
wrong("traffic_pp_each_layer", step=6, hint="pp_layers",
      old="min(pp - 1, 2) * activation", new="min(pp - 1, 2) * activation * layers / pp")
wrong("traffic_pp_forward", step=6, hint="pp_forward",
      old="min(pp - 1, 2) * activation", new="activation if pp > 1 else 0")
wrong("traffic_tp_no_ring", step=6, hint="no_ring",
      old="2 * (tp - 1) / tp *", new="")
wrong("traffic_tp_pieces", step=6, hint="tp_pieces",
      old="tp * activation", new="tp * activation / tp")
wrong("traffic_tuple", step=6, hint="traffic_keys",
      old='"pp": min(pp - 1, 2) * activation,', new="")
wrong("order_dictionary", step=6, hint="order_kind",
      old="sorted(sent, key=sent.get)", new="dict(sorted(sent.items(), key=lambda pair: pair[1]))")
wrong("traffic_dp_of_tp_alone", step=6, hint="dp_whole",
      old="layers / (tp * pp)", new="layers / tp")
wrong("traffic_pp_divided", step=6, hint="pp_whole",
      old="min(pp - 1, 2) * activation", new="min(pp - 1, 2) * activation / tp")
wrong("traffic_pp_mean", step=6, hint="pp_mean",
      old="min(pp - 1, 2) * activation", new="2 * (pp - 1) / pp * activation")

# step 7

wrong("hook_divides_twice", step=7, hint="divided_twice",
      old="bucket.buffer().to", new="(bucket.buffer() / dist.get_world_size(group)).to")
wrong("hook_fp16", step=7, hint="fp16",
      old="torch.bfloat16", new="torch.float16")
wrong("hook_fp32", step=7, hint="not_narrow",
      old="narrow, group", new="bucket.buffer(), group")
wrong("hook_own", step=7, hint="not_sent", old=Body("bf16_hook"), new="""
    future = torch.futures.Future()
    future.set_result(bucket.buffer().to(torch.bfloat16).float())
    return future
""")
wrong("hook_root", step=7, hint="average",
      old="/ dist.get_world_size(group)", new="/ dist.get_world_size(group) ** 0.5")
wrong("hook_stays_narrow", step=7, hint="stays_narrow",
      old="future.value()[0].to(bucket.buffer().dtype)", new="future.value()[0]")
wrong("hook_sum", step=7, hint="not_divided",
      old="/ dist.get_world_size(group)", new="")
wrong("hook_tensor", step=7, hint="not_a_future",
      old="return work.get_future().then(widen)", new="")
wrong("hook_world", step=7, hint="world_group",
      old="group, async_op", new="dist.group.WORLD, async_op")
wrong("hook_all_ranks", step=7, hint="divided_by_world",
      old="/ dist.get_world_size(group)", new="/ dist.get_world_size()")
wrong("hook_list", step=7, hint="future_kind",
      old="return future.value()[0].to(bucket.buffer().dtype) / dist.get_world_size(group)",
      new="return [future.value()[0].float() / dist.get_world_size(group)]")
wrong("hook_value", step=7, hint="future_value",
      old="future.value()[0]", new="future.value()")
wrong("hook_waits_later", step=7, hint="hook_waits",
      old="return work.get_future().then(widen)",
      new="work.wait()\nreturn work.get_future().then(widen)")
wrong("hook_widens_at_once", step=7, hint="not_a_future",
      old="return work.get_future().then(widen)", new="return widen(work.get_future())")

# step 8

wrong("elastic_fixed", step=8, hint="elastic_range",
      old='f"--nnodes=1:{nodes}"', new='f"--nnodes={nodes}"')
wrong("elastic_master", step=8, hint="elastic_master",
      old='f"--rdzv-endpoint={master}:{port}"',
      new='f"--master-addr={master}",\n        f"--master-port={port}"')
wrong("elastic_no_name", step=8, hint="elastic_id",
      old='f"--rdzv-id={job}",', new="")
wrong("elastic_no_port", step=8, hint="elastic_endpoint",
      old='f"--rdzv-endpoint={master}:{port}"', new='f"--rdzv-endpoint={master}"')
wrong("elastic_no_restarts", step=8, hint="elastic_restarts",
      old='"--max-restarts=3",', new="")
wrong("elastic_static_backend", step=8, hint="elastic_backend",
      old='"--rdzv-backend=c10d",', new="")
wrong("elastic_every_host", step=8, hint="elastic_host",
      old='"--max-restarts=3",', new='"--max-restarts=3",\n        "--rdzv-conf=is_host=1",')
