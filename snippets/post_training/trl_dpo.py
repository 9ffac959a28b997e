"""Two steps of TRL's DPOTrainer change the weights in the same way as a DPO loss of six lines.

The pairs are random answers of different lengths. The reference model differs from the policy.
TRL computes the log-probabilities of the reference either in each step, or once before the
training. Both ways lead to the same weights as the loss by hand. With a supervised term, TRL
and the loss by hand also agree. In the last two rows, TRL has a different loss or a different
beta, so its weights differ from the weights by hand.

Needs: pip install trl
"""

import logging
import os
import sys
import warnings

import torch
import torch.nn.functional as F

logging.disable(logging.WARNING)  # packages that TRL imports warn about missing GPU kernels
warnings.simplefilter("ignore")
os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here is downloaded

try:
    from datasets import Dataset, disable_progress_bars
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.trainer_callback import PrinterCallback, ProgressCallback
    from transformers.utils.logging import disable_progress_bar
    from trl import DPOConfig, DPOTrainer
except ImportError:
    sys.exit("this program needs: pip install trl")

TOKENS = [".", "$", "(", "[", ")", "]"]  # padding, end of sequence, opening, closing brackets
PAD, END, OPENING, CLOSING = 0, 1, 2, 4  # a closing bracket is its opening bracket + 2
BETA, KEEP, RATE, PAIRS = 0.5, 0.3, 0.1, 16


# --8<-- [start:loss]
def dpo_loss(chosen, rejected, reference_chosen, reference_rejected, beta: float):
    """The mean loss of the pairs, and the margin of each pair. All inputs are [n]."""
    reward_chosen = beta * (chosen - reference_chosen)  # the implicit rewards
    reward_rejected = beta * (rejected - reference_rejected)
    margin = reward_chosen - reward_rejected
    return -F.logsigmoid(margin).mean(), margin


# --8<-- [end:loss]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, without any special token in front."""
    words = {character: number for number, character in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=".", eos_token="$")


def start_policy() -> LlamaForCausalLM:
    """The policy before the first step; it already differs from the reference model."""
    policy = LlamaForCausalLM.from_pretrained("reference")
    rng = torch.Generator().manual_seed(2)
    for parameter in policy.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=rng)
    return policy


def weights_of(model) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def draw_pairs() -> dict[str, list[str]]:
    """Random brackets: prompts of 4 characters, answers of 1 to 7 characters."""
    rng = torch.Generator().manual_seed(3)

    def text(length: int) -> str:
        numbers = torch.randint(OPENING, len(TOKENS), (length,), generator=rng)
        return "".join(TOKENS[i] for i in numbers)

    def answer() -> str:
        return text(int(torch.randint(1, 8, (), generator=rng)))

    prompts = [text(4) for _ in range(PAIRS)]
    return {
        "prompt": prompts,
        "chosen": [answer() for _ in prompts],
        "rejected": [answer() for _ in prompts],
    }


def weights_by_trl(pairs: dict[str, list[str]], tokenizer, **settings):
    """Two steps of SGD by DPOTrainer.

    Returns the weights, the losses and the mean margins of both steps, and how often the
    reference model ran before the training and in the training.
    """
    reference, passes = LlamaForCausalLM.from_pretrained("reference"), []
    reference.register_forward_hook(lambda *_: passes.append(1))
    trainer = DPOTrainer(
        model=start_policy(),
        ref_model=reference,
        args=DPOConfig(
            output_dir="run",
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=PAIRS,
            max_steps=2,
            max_grad_norm=0.0,  # do not clip the gradient
            optim="sgd",
            learning_rate=RATE,
            lr_scheduler_type="constant",
            logging_steps=1,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **settings,
        ),
        train_dataset=Dataset.from_dict(pairs),
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    before = len(passes)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    losses, margins = ([log[name] for log in logs] for name in ("loss", "rewards/margins"))
    return weights_of(trainer.model), losses, margins, (before, len(passes) - before)


def log_prob(model, prompt: str, answer: str) -> torch.Tensor:
    """The log-probability of one answer and of the END after it, without any padding."""
    ids = [TOKENS.index(c) for c in prompt + answer] + [END]
    scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return sum(scores[i - 1, ids[i]] for i in range(len(prompt), len(ids)))


def weights_by_hand(pairs: dict[str, list[str]], keep: float):
    """The same two steps with `dpo_loss`, one answer after the other.

    `keep` times the supervised loss, a mean over all tokens of the chosen answers, is added.
    """
    policy, reference = start_policy(), LlamaForCausalLM.from_pretrained("reference")

    def both(model) -> list[torch.Tensor]:
        sides = pairs["chosen"], pairs["rejected"]
        return [
            torch.stack([log_prob(model, *x) for x in zip(pairs["prompt"], side, strict=True)])
            for side in sides
        ]

    with torch.no_grad():
        known = both(reference)
    losses, margins = [], []
    for _ in range(2):
        policy.zero_grad()
        chosen, rejected = both(policy)
        loss, margin = dpo_loss(chosen, rejected, *known, BETA)
        tokens = sum(len(answer) + 1 for answer in pairs["chosen"])  # END is a token, too
        loss = loss - keep * chosen.sum() / tokens
        loss.backward()
        losses.append(float(loss.detach()))
        margins.append(float(margin.detach().mean()))
        for parameter in policy.parameters():
            parameter.data -= RATE * parameter.grad
    return weights_of(policy), losses, margins


def main() -> None:
    torch.set_num_threads(1)
    disable_progress_bar()
    disable_progress_bars()
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "vocab_size": len(TOKENS), "initializer_range": 0.1}
    special = {"pad_token_id": PAD, "eos_token_id": END, "bos_token_id": None}
    LlamaForCausalLM(LlamaConfig(**shape, **special)).save_pretrained("reference")
    tokenizer, pairs = build_tokenizer(), draw_pairs()
    plain, kept = weights_by_hand(pairs, 0.0), weights_by_hand(pairs, KEEP)
    start = weights_of(start_policy())

    both = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, KEEP]}
    rows = [  # name, settings of TRL, the steps by hand, whether they are the same
        ("reference in each step", {}, plain, True),
        ("precompute_ref_log_probs", {"precompute_ref_log_probs": True}, plain, True),
        ("sigmoid + 0.3 sft", both, kept, True),
        ("ipo", {"loss_type": ["ipo"]}, plain, False),
        ("beta of 0.1 (the default)", {"beta": 0.1}, plain, False),
    ]
    print("forward passes of the reference model: before the training + in the training")
    print("setting of TRL              passes   TRL's losses     by hand          distance")
    for name, changes, (ours, our_losses, our_margins), same in rows:
        theirs, losses, margins, passes = weights_by_trl(
            pairs, tokenizer, **{"beta": BETA} | changes
        )
        distance = float((theirs - ours).norm() / (ours - start).norm())
        shown = f"≈{distance:.0e}" if same else f"{distance:.2f}"
        numbers = "{:.4f}  {:.4f}   {:.4f}  {:.4f}   ".format(*losses, *our_losses)
        print(f"{name:28} {passes[0]} + {passes[1]}   {numbers}{shown}")
        assert passes == ((1, 0) if "precompute_ref_log_probs" in changes else (0, 2))
        if same:
            assert distance < 1e-5
            torch.testing.assert_close(losses, our_losses, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(margins, our_margins, rtol=1e-4, atol=1e-4)
        else:
            assert distance > 0.5


if __name__ == "__main__":
    main()
