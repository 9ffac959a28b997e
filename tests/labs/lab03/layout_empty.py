"""Step 2: the values are not copied"""

STEP, HINT = 2, "layout_values"


def lay_out(tensors, n):

    count = sum(tensor.numel() for tensor in tensors)
    flat = tensors[0].new_zeros(-(-count // n) * n)
    windows, place = [], 0
    for tensor in tensors:
        windows.append(flat[place : place + tensor.numel()].view_as(tensor))
        place += tensor.numel()
    return flat, windows
