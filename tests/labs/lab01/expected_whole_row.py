"""Step 3: a scatter that gives the whole row"""

STEP, HINT = 3, "other_part"


def expected(name, table, rank, root):
    world, total = len(table), table.sum(dim=0)
    results = {
        "broadcast": table[root],
        "scatter": table[root],
        "gather": table if rank == root else None,
        "all-gather": table,
        "reduce": total if rank == root else None,
        "all-reduce": total,
        "reduce-scatter": total[rank],
        "all-to-all": table[:, rank],
        "send/recv": table[(rank - 1) % world],
    }
    return results[name]
