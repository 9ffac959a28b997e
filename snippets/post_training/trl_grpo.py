"""TRL's GRPOTrainer changes the weights in the same way as a loss of a few lines by hand.

The Trainer receives fixed answers to four prompts and makes two steps of SGD on them. Each
step has two micro-batches. Before the second step, the policy has changed, so the clip acts in
this step. The same two steps are then made by hand. This is repeated for seven settings of the
loss. The table shows how far the weights by hand are from TRL's weights: only the loss of the
same name leads to equal weights. In the last part, TRL also samples, and the policy learns to
close brackets.

Needs: pip install trl
"""

import itertools
import logging
import os
import sys
import warnings

import torch
import torch.nn.functional as F

logging.disable(logging.WARNING)  # packages that TRL imports warn about missing GPU kernels
warnings.simplefilter("ignore")
os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here is downloaded
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # rollout_func is experimental

try:
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.trainer_callback import PrinterCallback, ProgressCallback
    from transformers.utils.logging import disable_progress_bar
    from trl import GRPOConfig, GRPOTrainer
except ImportError:
    sys.exit("this program needs: pip install trl")

TOKENS = [".", "$", "(", "[", ")", "]"]  # padding, end of sequence, opening, closing brackets
PAD, END, OPENING, CLOSING = 0, 1, 2, 4  # a closing bracket is its opening bracket + 2
GROUP, PROMPTS, MICRO_BATCHES = 8, ["((((", "([[(", "[[[[", "[()]"], 2
LONGEST, LIMIT = 8, 10  # tokens of the longest answer; the limit max_completion_length
CLIP, CISPO_CLIP, BETA, RATE = 0.2, 1.1, 0.5, 0.1

# --8<-- [start:settings]
SETTINGS = {  # the name in our table -> the settings of TRL's GRPOConfig
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dapo": {"loss_type": "dapo"},  # TRL's default
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo", "epsilon_high": CISPO_CLIP},
    "dapo+KL": {"loss_type": "dapo", "beta": BETA},
}
# --8<-- [end:settings]


def group_advantages(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """GRPO: each reward minus its group's mean, divided by the group's standard deviation."""
    grouped = rewards.view(-1, group)
    centred = grouped - grouped.mean(1, keepdim=True)
    return (centred / (grouped.std(1, keepdim=True) + 1e-4)).flatten()


def clipped_loss(new, old, advantages, mask, clip: float = 0.2) -> torch.Tensor:
    """The clipped objective of PPO with its sign reversed, a mean over all answer tokens.

    `new` and `old` are log-probabilities [n, t], `advantages` is [n], `mask` is [n, t].
    """
    ratio = (new - old).exp()
    a = advantages[:, None]
    objective = torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)
    return -(objective * mask).sum() / mask.sum()


def our_loss(name: str, new, old, reference, advantages, mask, all_tokens: int):
    """The part of one micro-batch in the loss of a step, for one name of SETTINGS.

    `new`, `old` and `reference` are log-probabilities [n, t]; `all_tokens` is the number of
    answer tokens in all micro-batches of the step.
    """
    n, tokens = len(new), mask.sum()
    lengths = mask.sum(1, keepdim=True)
    if name == "gspo":  # one ratio per answer: the geometric mean of the ratios of its tokens
        new, old = ((x * mask).sum(1, keepdim=True) / lengths for x in (new, old))
    if name in ("grpo", "gspo"):  # each answer counts the same
        rows = [slice(i, i + 1) for i in range(n)]
        each = [clipped_loss(new[i], old[i], advantages[i], mask[i], CLIP) for i in rows]
        return torch.stack(each).mean() / MICRO_BATCHES
    if name == "cispo":
        # The clipped ratio is a constant weight, so no token loses its gradient.
        weight = (new - old).exp().clamp(max=CISPO_CLIP).detach()
        return -(weight * advantages[:, None] * new * mask).sum() / all_tokens
    loss = clipped_loss(new, old, advantages, mask, CLIP)
    if name == "bnpo":  # each token of the micro-batch counts the same
        return loss / MICRO_BATCHES
    if name == "dr_grpo":  # a constant instead of the number of tokens
        return loss * tokens / (n * LIMIT) / MICRO_BATCHES
    loss = loss * tokens / all_tokens  # dapo: each token of the whole step counts the same
    if name == "dapo+KL":
        gap = reference - new
        divergence = (gap.exp() - gap - 1) * (new - old).exp()
        loss = loss + BETA * (divergence * mask).sum() / all_tokens
    return loss


def answer_log_probs(model, prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """The log-probability of each answer token in one forward pass, [n, t]."""
    logits = model(torch.cat([prompts, answers], 1)[:, :-1]).logits[:, prompts.shape[1] - 1 :]
    return logits.log_softmax(-1).gather(2, answers[..., None])[..., 0]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, without any special token in front."""
    words = {character: number for number, character in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=".", eos_token="$")


def arguments(**settings) -> GRPOConfig:
    """The settings of both parts of the program."""
    return GRPOConfig(
        output_dir="run",
        bf16=False,  # TRL's default is True, also on a CPU
        gradient_checkpointing=False,  # TRL's default is True
        num_generations=GROUP,
        num_iterations=2,  # two optimizer steps on each batch of answers
        lr_scheduler_type="constant",
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **settings,
    )


class Recorder(GRPOTrainer):
    """A GRPOTrainer that also keeps the micro-batches of its steps."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.micro_batches = [*getattr(self, "micro_batches", []), inputs]
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def fixed_answers() -> tuple[list[list[int]], list[float]]:
    """Random answers of different lengths and random rewards for GROUP answers per prompt.

    All answers to the last prompt have the same reward, so their advantages are 0.
    """
    rng = torch.Generator().manual_seed(1)
    count = GROUP * len(PROMPTS)
    lengths = torch.randint(2, LONGEST + 1, (count,), generator=rng).tolist()
    answers = [torch.randint(len(TOKENS), (n,), generator=rng).tolist() for n in lengths]
    rewards = torch.randint(8, (count,), generator=rng).div(8)
    rewards[-GROUP:] = 0.5
    assert len(set(map(tuple, answers))) == count  # an answer identifies its row
    return answers, rewards.tolist()


def start_policy() -> LlamaForCausalLM:
    """The policy before the first step; it already differs from the reference model."""
    policy = LlamaForCausalLM.from_pretrained("reference")
    rng = torch.Generator().manual_seed(2)
    for parameter in policy.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=rng)
    return policy


def weights_of(model) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def weights_by_trl(name: str, tokenizer: PreTrainedTokenizerFast):
    """Let GRPOTrainer make two steps of SGD.

    Returns the weights, the micro-batches, and the fraction of clipped tokens of each step.
    """
    answers, rewards = fixed_answers()

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict:
        assert prompts == [prompt for prompt in PROMPTS for _ in range(GROUP)]
        log_probs = [[0.0] * len(answer) for answer in answers]  # used only together with vLLM
        ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        return {"prompt_ids": ids, "completion_ids": answers, "logprobs": log_probs}

    trainer = Recorder(
        model=start_policy(),
        reward_funcs=lambda completions, **_: rewards,
        args=arguments(
            per_device_train_batch_size=GROUP * len(PROMPTS) // MICRO_BATCHES,
            gradient_accumulation_steps=MICRO_BATCHES,
            max_completion_length=LIMIT,
            max_steps=2,
            max_grad_norm=0.0,  # do not clip the gradient
            optim="sgd",
            learning_rate=RATE,
            shuffle_dataset=False,
            **SETTINGS[name],
        ),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tokenizer,
        rollout_func=rollout,
    )
    run(trainer)
    key = "cispo_clip_ratio" if name == "cispo" else "clip_ratio/region_mean"
    clipped = [log[key] for log in trainer.state.log_history if key in log]
    return weights_of(trainer.model), trainer.micro_batches, clipped


def weights_by_hand(name: str, micro_batches: list[dict]) -> torch.Tensor:
    """The same two steps with `our_loss`. Only the order of the answers comes from TRL."""
    policy, reference = start_policy(), LlamaForCausalLM.from_pretrained("reference")
    answers, rewards = fixed_answers()
    if name == "dr_grpo":  # without the division by the standard deviation
        grouped = torch.tensor(rewards).view(-1, GROUP)
        advantages = (grouped - grouped.mean(1, keepdim=True)).flatten()
    else:
        advantages = group_advantages(torch.tensor(rewards), GROUP)
    batches = []
    for inputs in micro_batches[:MICRO_BATCHES]:
        rows = []
        for ids, kept in zip(inputs["completion_ids"], inputs["completion_mask"], strict=True):
            rows.append(answers.index(ids[kept.bool()].tolist()))
        padded = [F.pad(torch.tensor(answers[i]), (0, LONGEST - len(answers[i]))) for i in rows]
        mask = torch.tensor([[t < len(answers[i]) for t in range(LONGEST)] for i in rows])
        prompts = torch.tensor([[TOKENS.index(c) for c in PROMPTS[i // GROUP]] for i in rows])
        samples = prompts, torch.stack(padded)
        with torch.no_grad():
            old = answer_log_probs(policy, *samples), answer_log_probs(reference, *samples)
        batches.append((samples, *old, advantages[rows], mask.double()))
    all_tokens = sum(map(len, answers))
    for _ in range(2):
        policy.zero_grad()
        for samples, *rest in batches:
            new = answer_log_probs(policy, *samples)
            our_loss(name, new, *rest, all_tokens).backward()
        for parameter in policy.parameters():
            parameter.data -= RATE * parameter.grad
    return weights_of(policy)


def run(trainer: GRPOTrainer) -> None:
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.train()


def compare(tokenizer: PreTrainedTokenizerFast) -> None:
    """Print how far the weights by hand are from TRL's, for each pair of settings."""
    start = weights_of(start_policy())
    print("distance between the two steps by hand and TRL's two steps, in % of TRL's steps")
    print(f"{'TRL':8} {'by hand:':>9}" + "".join(f"{name:>9}" for name in SETTINGS))
    by_hand, largest = {}, 0.0
    for name in SETTINGS:
        by_trl, micro_batches, clipped = weights_by_trl(name, tokenizer)
        orders = [batch["completion_ids"].tolist() for batch in micro_batches]
        first = by_hand.setdefault("order", orders)
        assert orders == first and orders[:2] == orders[2:]  # both steps, all settings
        row = []
        for other in SETTINGS:
            if other not in by_hand:
                by_hand[other] = weights_by_hand(other, micro_batches)
            row.append(float((by_hand[other] - by_trl).norm() / (by_trl - start).norm()))
            if other == name:
                largest = max(largest, row[-1])
                assert row[-1] < 1e-5, (name, row)
            else:
                assert row[-1] > 0.04, (name, other, row)
        print(f"{name:18}" + "".join(f"{100 * value:9.1f}" for value in row))
        # the clip acts only in step 2, and not on all tokens
        assert clipped[0] == 0 and 0.05 < clipped[1] < 0.6, (name, clipped)
    print(f"largest distance on the diagonal: ≈{largest:.0e} of TRL's steps\n")


def right_answer(prompt: str) -> list[int]:
    """The tokens that close the brackets of `prompt` in order, and END."""
    return [TOKENS.index(c) + CLOSING - OPENING for c in reversed(prompt)] + [END]


@torch.no_grad()
def close_probability(policy, length: int) -> float:
    """The mean probability that the policy closes all brackets and then ends."""
    rows = itertools.product((OPENING, OPENING + 1), repeat=length)
    prompts = torch.tensor(list(rows))
    right = F.pad(prompts.flip(1) + (CLOSING - OPENING), (0, 1), value=END)
    return float(answer_log_probs(policy, prompts, right).sum(1).exp().mean())


def learn(tokenizer: PreTrainedTokenizerFast, seed: int, length: int = 2) -> tuple[list, dict]:
    """TRL samples and trains for 60 optimizer steps.

    Returns the mean reward of each batch, and the number of answers in which the reward
    function sees an END. Also asserts that right answers became more probable.
    """
    steps, rng = 60, torch.Generator().manual_seed(seed)
    policy = LlamaForCausalLM.from_pretrained("reference")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for _ in range(100):  # teach only the format: random closing brackets, then END
        tokens = torch.randint(OPENING, CLOSING, (64, 2 * length + 1), generator=rng)
        tokens[:, length:] += CLOSING - OPENING
        tokens[:, -1] = END
        loss = -answer_log_probs(policy, tokens[:, :length], tokens[:, length:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    numbers = torch.randint(OPENING, CLOSING, (16 * steps, length), generator=rng)
    data = {"prompt": ["".join(TOKENS[i] for i in row) for row in numbers]}

    ends = {"completions": 0, "completion_ids": 0}  # how many answers contain an END

    # --8<-- [start:reward]
    def closes_all_brackets(prompts, completions, completion_ids, **_) -> list[float]:
        ends["completions"] += sum(TOKENS[END] in text for text in completions)
        ends["completion_ids"] += sum(END in ids for ids in completion_ids)
        brackets = ["".join(TOKENS[i] for i in ids if i > END) for ids in completion_ids]
        assert [text.replace(" ", "") for text in completions] == brackets  # without END
        pairs = zip(prompts, completion_ids, strict=True)
        return [float(ids == right_answer(prompt)) for prompt, ids in pairs]

    trainer = GRPOTrainer(
        model=policy,
        reward_funcs=closes_all_brackets,
        args=arguments(
            per_device_train_batch_size=16 * GROUP,
            max_completion_length=length + 1,
            max_steps=steps,
            learning_rate=1.5e-3,
            loss_type="bnpo",
            seed=0,  # of the sampled answers; `seed` changes the prompts and the first policy
        ),
        train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer,
    )
    # --8<-- [end:reward]
    start = close_probability(policy, length)
    run(trainer)
    assert close_probability(policy, length) > max(0.9, start + 0.3), "the policy must learn"
    return [log["reward"] for log in trainer.state.log_history if "reward" in log], ends


def main() -> None:
    torch.set_num_threads(1)
    disable_progress_bar()
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "vocab_size": len(TOKENS), "initializer_range": 0.1}
    special = {"pad_token_id": PAD, "eos_token_id": END, "bos_token_id": None}
    reference = LlamaForCausalLM(LlamaConfig(**shape, **special))
    reference.double().save_pretrained("reference")  # from_pretrained loads float64, too
    tokenizer = build_tokenizer()
    compare(tokenizer)
    print("TRL samples and trains: the mean reward of ten batches of 128 answers")
    runs = {seed: learn(tokenizer, seed) for seed in (0, 2)}
    assert runs[0][0] != runs[2][0]
    for seed, (rewards, ends) in runs.items():
        assert len(rewards) == 30  # one batch of answers for two optimizer steps
        means = [sum(rewards[i : i + 10]) / 10 for i in (0, 10, 20)]
        print(f"seed {seed}:   " + "   ".join(f"≈{mean:.2f}" for mean in means))
        assert means[2] > means[0] + 0.3, "TRL did not improve the reward"
        assert abs(sum(means) * 10 - sum(rewards)) < 1e-6, "all batches must be in the means"
        assert ends["completions"] == 0 and ends["completion_ids"] > 0.9 * len(rewards) * 128
    print(f"answers with an END in completion_ids: ≈{ends['completion_ids']}")
    print(f"answers with an END in completions:     {ends['completions']}")


if __name__ == "__main__":
    main()
