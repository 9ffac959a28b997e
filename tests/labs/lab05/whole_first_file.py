"""Step 8: the file of rank 0, whose tensors are empty in stage 3"""

from pathlib import Path

import torch

STEP, HINT = 8, "whole_weights"


def whole_weights(folder):
    tag = Path(folder, "latest").read_text()
    file = next(Path(folder, tag).glob("*rank_0*model_states.pt"))
    return torch.load(file, weights_only=False)["module"]
