"""Step 2: no padding"""

STEP, HINT = 2, "layout_length"


def lay_out(tensors, n):

    count = sum(tensor.numel() for tensor in tensors)
    flat = tensors[0].new_zeros(count)
    windows, place = [], 0
    for tensor in tensors:
        window = flat[place : place + tensor.numel()].view_as(tensor)
        windows.append(window.copy_(tensor))
        place += tensor.numel()
    return flat, windows
