"""What a page invites to copy works in a project: on models that its program does not have."""

from __future__ import annotations

import ast
import importlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from processes import HANG, start

ROOT = Path(__file__).resolve().parent.parent
INPUTS = ["docs", "snippets", "tests/copied.py"]
CHAPTERS = ("02", "03", "04", "05", "07", "09", "10")
EMBEDDED = re.compile(r'--8<-- "snippets/([^":]+)\.py:(\w+)"')
TAKES = re.compile(r"Module|Sequential|Parameter|Optimizer|DistributedDataParallel|DDP")
NUMBERS = {"int", "float", "tuple"}
BY_NAME = {"model", "module", "ddp", "optimizer", "layers", "stage", "experts"}
IMPORTED = re.findall(r'program\("(\w+/\w+)"', (ROOT / "tests/copied.py").read_text("utf-8"))
# why the classes and functions of some programs, PROGRAM:NAME, are not tried by copied.py
REASONS = {
    "tried with the wrapper or optimizer that has it": """
        buckets:Bucket mini_ddp:Bucket mini_ddp:fill_buckets zero1:Flat zero2:Bucket
        mini_fsdp:Unit""",
    "it has torch's own wrapper, or state dicts, do the work, whatever the model": """
        torch_ddp:wrap uneven_inputs:train_with_join accumulation:synchronize_last
        expert_parallel_api:ExpertParallel expert_parallel_api:cut two_dimensions:cut
        clip_two_meshes:clip_by_mesh optimizer_by_name:load_by_number
        optimizer_by_name:load_by_name parameter_groups:all_at_once
        parameter_groups:groups_first parameter_groups:other_layer
        parameter_groups:as_saved parameter_groups:by_name
        loss_scale_minimum:LossScaler loss_scale_minimum:first_overflow
        parallelize_module_api:three_inputs parallelize_module_api:tensor_parallel
        parallelize_module_api:sequence_parallel parallelize_module_api:sum_partial_gradients
        checkpoint_reshard:save fsdp2:shard_blocks wrapping:blocks wrapping:linears
        prefetch:look_ahead clip_and_accumulate:reduce_last clip_and_accumulate:stay_whole
        checkpointing_with_sharding:checkpoint_inside checkpointing_with_sharding:checkpoint_outside
        fsdp1_strategies:old fsdp1_strategies:new tied_weights:cut_apart
        tied_weights:kept_together patchwork:broadcast pipelining_api:train_step
        clip_before_unscale:right mean_of_means:global_mean conversions:save conversions:load
        uneven_mesh:from_every_rank uneven_mesh:from_rank_0 uneven_mesh:through_dcp
        lora:train lora:shard peft_lora:save peft_lora:with_peft checkpoint_reshard:load
        device_map_auto:automatic uniform_dtype:wrap inf_on_one_rank:AllRanksScaler""",
    "a function on tensors, whose program compares the gradients": """
        fp8_training:Scale custom_function:Plain custom_function:SameState
        custom_function:Always32 lse_gradient:Part triton_autograd:FlashAttention""",
    "a model, or part of one, with its program's sizes": """
        unused_parameters:TwoHeads same_augmentation:Augmented flex_context_parallel:Attention
        moe_dense:MixtureOfExperts grouped_experts:Experts grouped_experts:MixtureOfExperts
        two_link_dispatch:two_links pipelining_tracer:Net tensor_parallel_block:Block
        tensor_parallel_block:TensorParallelBlock bypassed_hooks:Model view_output:Model
        stages:Layer meta_init:initialise position_off_by_one:read torchscript:Gate
        sharded_embeddings:train bytes_held:NormedBlock bf16_positions:Buffers""",
    "it serves its program's model, on a CPU and in fp32, or captures it": """
        preemption:serve preemption:Stuck
        chunked_prefill:serve disaggregated:prefill disaggregated:decode
        disaggregated:hand_over continuous_batching:serve
        continuous_batching:check_alone speculative:round_
        cuda_graph_decode:captured""",
    "the scene of a failure or of a measurement": """
        threads_or_processes:data_parallel throughput:trainer ready_twice:losses
        late_parameters:apply_change in_place_grad_view:kept_gradients rank0_only:run
        gradient_clipping:clip_then_average gradient_clipping:average_then_clip
        cpu_oversubscribed:seconds_per_step naive_split:split_step recompute:step
        own_schedule:train_step unscaled_loss:step tied_embeddings:split_backward
        batchnorm_micro_batches:gradient stale_optimizer:built_before
        stale_optimizer:built_after resumed_without_scaler:step uneven_forwards:evaluate
        local_norm:clip_by_own_norm
        underflow:gradients clip_before_unscale:wrong leaks:cycle leaks:no_cycle leaks:Node
        leaks:loss_with_graph leaks:loss_as_number leaks:error_kept leaks:error_as_text
        leaks:hook_left leaks:hook_removed loader_failures:Corrupt loader_failures:TooLarge
        loader_failures:Ragged dropout_in_eval:Forgetful dropout_in_eval:Fixed
        export_decode:Halves export_decode:Stops export_decode:StopsNot tensorrt_road:refused
        elastic:save elastic:load sequence_lengths:of_length mfu:measure step_cost:step_seconds
        no_target_left:per_token no_target_left:accumulate frozen_inputs:require_grad""",
    "it simulates, counts or writes down, and has no model": """
        two_link_dispatch:Hop links:Layout
        record_stream:Allocator record_stream:Stream block_tables:TextPool
        fragmentation:Segments
        fragmentation:Expandable staging:CopyEngine
        nvme_bytes:Counting deepspeed_config:Recorder metrics:Metrics metrics:Handler gpu_metrics:Gpu gpu_metrics:Log
        speculation_priced:Draft mean_hides_tail:Served
        guided:fits guided:masked fleet_trace:Kind
        fleet:Hardware fleet:Fleet capacity:Model capacity:Load capacity:plan
        capacity_published:predicted decode_step_times:Case""",
    "it brings data, whatever the model": "stream:Stream stateful_loader:Stream",
    "its argument is one parameter": "mixed_precision_policy:vectors_in_fp32",
}


def takes_a_model(node: ast.stmt) -> bool:
    if isinstance(node, ast.ClassDef):
        return not {"TorchDispatchMode", "NamedTuple"} & {ast.unparse(b) for b in node.bases}
    every = [*node.args.args, *node.args.kwonlyargs]
    names = {a.arg for a in every if ast.unparse(a.annotation or a) not in NUMBERS}
    return bool(BY_NAME & names or TAKES.search(ast.unparse(node.args)))


def shown(text: str, section: str) -> Iterator[ast.stmt]:
    """Classes and functions that have a section's name, or stand between its marks."""
    head, _, rest = text.partition(f"--8<-- [start:{section}]")
    begin, lines = head.count("\n") + 1, rest.partition(f"[end:{section}]")[0].count("\n")
    tree = ast.parse(text)
    functions = {node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in functions | {node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}:
        if node.name == section or begin <= node.lineno < begin + lines:
            yield node


def invited() -> Iterator[str]:
    """Every class that a page shows, and every function that takes a model or an optimizer.

    Other functions take numbers and tensors, and their programs compare what they return.
    """
    for page in sorted((ROOT / "docs").glob("*.md")):
        if page.name.startswith(CHAPTERS):
            for path, name in EMBEDDED.findall(page.read_text("utf-8")):
                for node in shown((ROOT / f"snippets/{path}.py").read_text("utf-8"), name):
                    if takes_a_model(node):
                        yield f"{Path(path).name}:{node.name}"


def test_what_a_page_shows_is_tried_or_has_a_reason() -> None:
    pytest.importorskip("torch")
    copied = importlib.import_module("copied")
    titles = [*copied.WAYS, *copied.OTHERS, *copied.ALONE]
    tested = {name for title in titles for name in copied.names(title)}
    shown = set(invited())
    reasons = [name for names in REASONS.values() for name in names.split()]
    tried = {name for name in shown if name.partition(":")[2] in tested}
    assert shown - tried - set(reasons) == set(), "add these to copied.py, or say why not"
    assert set(reasons) - (shown - tried) == set(), "these are tried, or on no page"
    stale = tested - {name.partition(":")[2] for name in tried}
    assert stale == {"ZeRO2", "ulysses_attention"}, "on no page, or it takes no model"


class Ranks(NamedTuple):
    count: int
    inputs: tuple[str, ...] = ("tests/copied.py", *(f"snippets/{p}.py" for p in IMPORTED))


@pytest.mark.parametrize("ranks", [Ranks(1), Ranks(2), Ranks(3)], ids=lambda r: str(r.count))
def test_it_works_on_other_models(ranks: Ranks, tmp_path: Path) -> None:
    """Each part in each case against one process, and each refusal by its sentence."""
    pytest.importorskip("torch")
    words = ["torchrun", f"--nproc-per-node={ranks.count}", str(ROOT / "tests/copied.py")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    out, err = start(words, tmp_path, environment).communicate(HANG)
    assert out.splitlines() == ["all tried"], out + err
