// What plan.py prints for --emit: settings and the line that starts a run.
import { gpusOf, layerElements, over } from "./layouts.js"

const says = value => ({ true: "True", false: "False" })[value] ?? (typeof value === "string" ? `'${value}'` : value)

const MLP_ALONE = [
  "def mlp_alone(self, block, wrap=FullAC._wrap_block, **names):",
  "    block.feed_forward = wrap(self, block.feed_forward, **names)",
  "    return block",
  "FullAC._wrap_block = mlp_alone",
]

export const launch = (target, model, s, l, sequence, gpu, name) => {
  const nodes = Math.ceil(gpusOf(l) / gpu.node), batch = l.micro_batch * l.micro_batches * l.dp
  const start = `torchrun --nnodes=${nodes} --nproc-per-node=${Math.min(gpusOf(l), gpu.node)}` +
    (nodes > 1 ? " --rdzv-backend=c10d --rdzv-endpoint=$FIRST_NODE:29500" : "")
  const mlp = l.recompute === "mlp"
  const again = l.recompute ? `# each block${mlp ? ".feed_forward" : ""} through torch.utils.checkpoint.checkpoint\n` : ""
  if (["deepspeed", "fsdp"].includes(target) && gpusOf(l) * l.ep > l.dp) {
    return `--emit: ${target} is written for DP alone; ${name} needs more`
  }
  if (target === "deepspeed") {
    const settings = {
      train_batch_size: batch, train_micro_batch_size_per_gpu: l.micro_batch, gradient_accumulation_steps: l.micro_batches,
      bf16: { enabled: true },
      zero_optimization: { stage: l.zero,
        ...l.zero === 2 && { reduce_bucket_size: layerElements(s, 1, 1), use_multi_rank_bucket_allreduce: false } },
      ...[1, 2].includes(l.zero) && { data_types: { grad_accum_dtype: "fp32" } },
      ...l.zero === 2 && { communication_data_type: "fp32" },
    }
    return `${JSON.stringify(settings, null, 2)}\n${again}${start} train.py --deepspeed --deepspeed_config ds.json`
  }
  if (target === "fsdp") {
    if (!l.zero) return `--emit: ${name} shards nothing; DistributedDataParallel does it`
    const keeps = [l.zero < 3 && "# before each backward; last: whether it is a step's last",
      l.zero === 1 && "model.set_requires_gradient_sync(last)", l.zero < 3 && "model.set_reshard_after_backward(last)"]
    return `mesh = init_device_mesh("cuda", (${l.dp},))
policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
${again}for block in model.layers:
    fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=${says(l.zero === 3)})
fully_shard(model, mesh=mesh, mp_policy=policy)  # ${l.micro_batches} micro-batches of ${l.micro_batch}
${[...keeps, start].filter(Boolean).join("\n")} train.py`
  }
  if (target === "torchtitan") {
    const base = model.replace("llama-3-", "llama3_")
    if (!/^llama3_(8|70|405)b$/.test(base)) return `--emit: torchtitan's own Llama 3 has 8b, 70b and 405b, not ${model}`
    const shard = l.zero ? l.dp : 1
    const settings = {
      "training.num_tokens_per_microbatch_per_dp_rank": l.micro_batch * sequence,
      "training.num_tokens_per_train_step": batch * sequence,
      "training.max_context_length": sequence,
      "parallelism.data_parallel_replicate_degree": over(l.dp, shard),
      "parallelism.data_parallel_shard_degree": shard,
      "parallelism.fsdp_reshard_after_forward": l.zero === 3 ? "always" : "never",
      "parallelism.tensor_parallel_degree": l.tp,
      "parallelism.context_parallel_degree": l.cp,
      "parallelism.pipeline_parallel_degree": l.pp,
    }
    if (l.pp > 1) {
      const ends = s.layers % l.pp ? 1 : 0
      Object.assign(settings, {
        "training.disable_cuda_graphs": true,
        "parallelism.pipeline_parallel_schedule": l.virtual > 1 ? "Interleaved1F1B" : "1F1B",
        "parallelism.num_pp_microbatches": l.micro_batches,
        "parallelism.pipeline_parallel_first_stage_less_layers": ends,
        "parallelism.pipeline_parallel_last_stage_less_layers": ends,
        "parallelism.pipeline_parallel_layers_per_stage": Math.floor((s.layers + 2 * ends) / (l.pp * l.virtual)),
      })
    }
    return [
      "# planned.py, for torchtitan",
      "from torchtitan.distributed.activation_checkpoint import FullAC",
      "from torchtitan.models.llama3 import model_registry",
      `from torchtitan.models.llama3.config_registry import ${base}`,
      ...mlp ? MLP_ALONE : [],
      "def planned():",
      `    config = ${base}()`,
      `    config.model_spec = model_registry('${base.slice(7).toUpperCase()}')`,
      ...Object.entries(settings).map(([name, value]) => `    config.${name} = ${says(value)}`),
      `    config.activation_checkpoint = ${again ? "FullAC.Config()" : "None"}`,
      "    return config",
      `${start} -m torchtitan.train --module planned --config planned`,
    ].join("\n")
  }
  const flags = {
    "num-layers": s.layers, "hidden-size": s.hidden, "num-attention-heads": s.heads, "ffn-hidden-size": s.ffn,
    "seq-length": sequence, "max-position-embeddings": sequence, "tensor-model-parallel-size": l.tp,
    "pipeline-model-parallel-size": l.pp, "context-parallel-size": l.cp, "micro-batch-size": l.micro_batch,
    "global-batch-size": batch,
  }
  return [
    `${gpusOf(l) > l.dp * l.pp && l.zero < 2 ? "CUDA_DEVICE_MAX_CONNECTIONS=1 " : ""}${start} pretrain_gpt.py`, ...Object.entries(flags).map(([name, value]) => `--${name} ${value}`),
    "--bf16", "--position-embedding-type rope", "--normalization RMSNorm",
    "--disable-bias-linear", "--attention-dropout 0", "--hidden-dropout 0",
    s.head_dim && `--kv-channels ${s.head_dim}`,
    s.kv_heads < s.heads && `--group-query-attention --num-query-groups ${s.kv_heads}`,
    l.virtual > 1 && `--num-virtual-stages-per-pipeline-rank ${l.virtual}`,
    s.layers % l.pp && "--account-for-embedding-in-pipeline-split",
    s.layers % l.pp && "--account-for-loss-in-pipeline-split",
    s.gated && "--swiglu",
    !s.tied && "--untie-embeddings-and-output-weights",
    l.tp > 1 && "--sequence-parallel",
    l.zero && "--use-distributed-optimizer",
    l.zero >= 2 && `--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads${l.zero === 3 ? "_params" : ""}`,
    l.zero >= 2 && "--no-gradient-accumulation-fusion --ckpt-format fsdp_dtensor",
    l.recompute === "layer" && "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    mlp && `--recompute-granularity selective --recompute-modules ${s.experts > 1 ? "moe" : "mlp"}`,
    s.experts > 1 && `--num-experts ${s.experts} --moe-router-topk ${s.active}`,
    s.experts > 1 && `--expert-model-parallel-size ${l.ep}`,
  ].filter(Boolean).join(" \\\n  ")
}
