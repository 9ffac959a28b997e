"""Step 3: every rank has the result of a reduce"""

STEP, HINT = 3, "everybody"


def expected(name, table, rank, root):
    world, total = len(table), table.sum(dim=0)
    results = {
        "broadcast": table[root],
        "scatter": table[root, rank],
        "gather": table if rank == root else None,
        "all-gather": table,
        "reduce": total,
        "all-reduce": total,
        "reduce-scatter": total[rank],
        "all-to-all": table[:, rank],
        "send/recv": table[(rank - 1) % world],
    }
    return results[name]
