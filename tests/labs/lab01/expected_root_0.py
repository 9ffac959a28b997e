"""Step 3: rank 0 is taken for the root"""

STEP, HINT = 3, "root_fixed"


def expected(name, table, rank, root):
    world, total = len(table), table.sum(dim=0)
    results = {
        "broadcast": table[0],
        "scatter": table[0, rank],
        "gather": table if rank == 0 else None,
        "all-gather": table,
        "reduce": total if rank == 0 else None,
        "all-reduce": total,
        "reduce-scatter": total[rank],
        "all-to-all": table[:, rank],
        "send/recv": table[(rank - 1) % world],
    }
    return results[name]
