"""Step 3: a reduce is taken for a gather of one row"""

STEP, HINT = 3, "not_summed"


def expected(name, table, rank, root):
    world, total = len(table), table.sum(dim=0)
    results = {
        "broadcast": table[root],
        "scatter": table[root, rank],
        "gather": table if rank == root else None,
        "all-gather": table,
        "reduce": table[rank] if rank == root else None,
        "all-reduce": total,
        "reduce-scatter": total[rank],
        "all-to-all": table[:, rank],
        "send/recv": table[(rank - 1) % world],
    }
    return results[name]
