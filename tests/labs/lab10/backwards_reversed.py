"""Step 7: the last backwards in reverse"""

STEP, HINT = 7, "backward_order"


def one_f_one_b(pipe):
    warm_up = min(pipe.grid.pp - 1 - pipe.grid.stage, pipe.m)
    for k in range(warm_up):
        pipe.forward(k)
    for k in range(pipe.m - warm_up):
        pipe.forward(warm_up + k)
        pipe.backward(k)
    for k in reversed(range(pipe.m - warm_up, pipe.m)):
        pipe.backward(k)
