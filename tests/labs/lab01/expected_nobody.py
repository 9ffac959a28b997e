"""Step 3: only the root has the sum of an all-reduce"""

STEP, HINT = 3, "nobody"


def expected(name, table, rank, root):
    world, total = len(table), table.sum(dim=0)
    results = {
        "broadcast": table[root],
        "scatter": table[root, rank],
        "gather": table if rank == root else None,
        "all-gather": table,
        "reduce": total if rank == root else None,
        "all-reduce": total if rank == root else None,
        "reduce-scatter": total[rank],
        "all-to-all": table[:, rank],
        "send/recv": table[(rank - 1) % world],
    }
    return results[name]
