"""Step 3: the sum along a row in place of the sum of rows"""

STEP, HINT = 3, "transposed"


def expected(name, table, rank, root):
    world, total = len(table), table.sum(dim=1)
    results = {
        "broadcast": table[root],
        "scatter": table[root, rank],
        "gather": table if rank == root else None,
        "all-gather": table,
        "reduce": total if rank == root else None,
        "all-reduce": total,
        "reduce-scatter": total[rank],
        "all-to-all": table[:, rank],
        "send/recv": table[(rank - 1) % world],
    }
    return results[name]
