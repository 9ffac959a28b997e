// "Training memory calculator": the stages of a layout, part by part, as snippets/planner/rank_memory.py adds them up.
import { computing, digits, embedded, inBytes, inSeconds, instrument, joined, picture, upTo, widthOf } from "./base.js"
import {
  ask, bars, closedForm, flying, gcd, gpuIn, gpusOf, layoutOf, memory, over, powers, replay, shapeIn, stages, stepTime, tables, total, whyNot, withUnseen,
} from "./layouts.js"

const partsOf = (s, l, sequence, index) => {
  const parts = closedForm(s, l, sequence, index), allocated = replay(s, l, sequence, index)
  const more = withUnseen(allocated) - total(parts)
  return { ...parts, "temporary": Math.max(0, more) }
}
const roomOf = gpu => memory.room * gpu.memory
const verdict = (size, room) => size <= room ? "fits" : `${inBytes(size - room)} too much`

const changes = (s, l, gpu) => {
  const fewer = { ...l, dp: over(l.dp, 2), micro_batches: 2 * l.micro_batches, ep: gcd(l.ep, over(l.dp, 2)) }
  const smaller = { ...l, micro_batch: over(l.micro_batch, 2), micro_batches: 2 * l.micro_batches }
  const already = "is so already"
  const made = {
    "ZeRO-1": l.zero === 0 ? { ...l, zero: 1 } : already,
    "ZeRO-2": l.zero < 2 ? { ...l, zero: 2 } : already,
    "FSDP": l.zero < 3 ? { ...l, zero: 3 } : already,
    "gradients in bf16": l.gradient_bytes > 2 ? { ...l, gradient_bytes: 2 } : already,
    "moments in bf16": l.moment_bytes > 2 ? { ...l, moment_bytes: 2 } : already,
    "MLPs recomputed": l.recompute ? already : { ...l, recompute: "mlp" },
    "layers recomputed": l.recompute === "layer" ? already : { ...l, recompute: "layer" },
    "half the micro-batch": l.micro_batch % 2 ? "has one sequence" : smaller,
  }
  for (const name of ["tp", "pp", "cp"]) {
    const twice = 2 * l[name]
    made[`twice the ${name.toUpperCase()}`] = name === "tp" && twice > gpu.node ? `TP ${twice} leaves the node`
      : l.dp % 2 ? `DP ${l.dp} gives none away` : { ...fewer, [name]: twice }
  }
  for (const [name, each] of Object.entries(made)) if (typeof each !== "string") made[name] = whyNot(s, each) || each
  return { "as it is": l, ...made }
}

export const compared = (s, l, sequence, gpu) => {
  const room = roomOf(gpu), others = {}, seconds = {}
  for (const [name, each] of Object.entries(changes(s, l, gpu))) {
    if (typeof each === "string") {
      others[name] = [each]
      continue
    }
    const some = new Set([0, Math.min(1, each.pp - 1), each.pp - 1])
    const size = Math.max(...[...some].map(index => total(partsOf(s, each, sequence, index))))
    const time = stepTime(s, each, sequence, gpu).seconds
    if (size <= room) seconds[name] = time
    others[name] = [inBytes(size), inSeconds(time), verdict(size, room)]
  }
  const fit = Object.keys(seconds)
  return { others, best: fit.length ? fit.reduce((best, each) => seconds[each] < seconds[best] ? each : best) : "" }
}

export const memoryOfStages = (s, l, sequence) => upTo(l.pp).map(index => partsOf(s, l, sequence, index))

export const facts = (s, l, sequence, gpu, every = memoryOfStages(s, l, sequence)) => {
  const totals = every.map(total), most = Math.max(...totals), index = totals.indexOf(most), room = roomOf(gpu)
  const parts = Object.entries(every[index]).filter(([, size]) => size)
  return {
    "gpus": String(gpusOf(l)),
    "batch": String(l.dp * l.micro_batch * l.micro_batches),
    "fullest": `stage ${index} of ${l.pp}; layers: ${stages(s, l.pp)[index].layers}; live micro-batches: ${digits(flying(l, index))}`,
    "needs": `${parts.map(([name, size]) => `${name} ${inBytes(size)}`).join(" + ")} = ${inBytes(most)}`,
    "room": `${inBytes(room)} of ${inBytes(gpu.memory)}`,
    "verdict": verdict(most, room),
    "stages": totals.map(inBytes).join(", "),
  }
}

// The memory of a stage during a step, for the worker.
export const step = async (...given) => (await import("./step_memory.js")).step(...given)

// ---- the page

const BYTES = { fp32: 4, bf16: 2 }
const AGAIN = { no: "", mlp: "mlp", yes: "layer" }
const allowed = (state, values) => !whyNot(shapeIn(state), layoutOf({ micro_batches: 1024, ...values }))
const plain = value => value.toLocaleString("en")
const slider = true

export const controls = [
  { name: "model", label: "model", options: () => Object.keys(tables.models), first: "llama-3-70b", main: true },
  { name: "gpu", label: "kind of GPU", options: () => Object.keys(tables.hardware), first: "h100" },
  { name: "sequence", label: "tokens in a sequence", options: () => powers(10, 17), first: 8192, text: plain, slider },
  { name: "dp", label: "data-parallel ranks, DP", options: () => powers(0, 10), first: 16, slider },
  { name: "tp", label: "tensor-parallel ranks, TP", first: 4, slider,
    options: state => powers(0, 6).filter(tp => tp <= gpuIn(state).node && allowed(state, { tp })) },
  { name: "pp", label: "pipeline stages, PP", first: 4, slider,
    options: state => upTo(33).slice(1).filter(pp => allowed(state, { pp })) },
  { name: "cp", label: "context-parallel ranks, CP", first: 1, slider,
    options: ({ sequence, dp }) => powers(0, 5).filter(cp => sequence / cp >= 1024 && dp * cp <= 4096) },
  { name: "ep", label: "expert-parallel ranks, EP", first: 1, slider,
    options: state => powers(0, 6).filter(ep => state.dp % ep === 0 && shapeIn(state).experts % ep === 0) },
  { name: "micro-batch", label: "sequences in a micro-batch, b", options: () => powers(0, 4), first: 1, slider, main: true },
  { name: "micro-batches", label: "micro-batches in a step, m", first: 32, slider, options: ({ pp }) => powers(0, 9).filter(m => m >= pp - 1) },
  { name: "chunks", label: "chunks in a stage, v", first: 1, slider,
    options: state => [1, 2, 4].filter(virtual => virtual === 1 ||
      allowed(state, { pp: state.pp, micro_batches: state["micro-batches"], virtual })) },
  { name: "zero", label: "sharded over the data-parallel ranks", options: () => upTo(4), first: 1, main: true,
    text: zero => ["nothing (DDP)", "optimizer state (ZeRO-1)", "optimizer state, gradients (ZeRO-2)", "everything (ZeRO-3, FSDP)"][zero] },
  { name: "recompute", label: "recomputed in the backward pass", options: () => Object.keys(AGAIN), first: "no",
    text: value => ({ no: "nothing", mlp: "MLPs", yes: "every layer" })[value] },
  { name: "gradients", label: "format of the gradients", options: () => Object.keys(BYTES), first: "fp32" },
  { name: "moments", label: "format of Adam's moments", options: () => Object.keys(BYTES), first: "fp32" },
  { name: "view", label: "picture", options: () => ["stages", "step"], first: "stages", main: true,
    text: view => ({ stages: "every stage", step: "one stage over time" })[view] },
  { name: "stage", label: "stage over time", options: ({ view, pp }) => view === "step" ? ["fullest", ...upTo(pp)] : ["fullest"], first: "fullest",
    text: stage => stage === "fullest" ? "the fullest stage" : `stage ${stage}` },
]

const presets = [
  { name: "Llama 3 70B, 256 H100, ZeRO-1", values: {} },
  { name: "Llama 3 8B, 8 H100, FSDP", values: { model: "llama-3-8b", dp: 8, tp: 1, pp: 1, zero: 3, "micro-batches": 8 } },
  { name: "Llama 3 70B over time, ZeRO-1", values: { view: "step" } },
  { name: "Llama 3 405B, 1,024 H100, ZeRO-1", values: { model: "llama-3-405b", dp: 8, tp: 8, pp: 16, "micro-batches": 64 } },
]

const layoutIn = ({ dp, pp, tp, cp, ep, zero, ...state }) => layoutOf({
  dp, pp, tp, cp, ep, zero, micro_batch: state["micro-batch"], micro_batches: state["micro-batches"], virtual: state.chunks,
  recompute: AGAIN[state.recompute], gradient_bytes: BYTES[state.gradients], moment_bytes: BYTES[state.moments],
})

export const start = place => {
  const { svg, list, compare, output } = picture("Single changes, with the same GPUs and the same batch",
    ["change", "memory of the fullest stage", "time of a step", "does it fit?"])
  let made, drawStep, pick // shows the parts of a pass
  const press = found => {
    const stage = found?.dataset.tip.match(/^stage (\d+)/)
    if (stage) made.change({ view: "step", stage: Number(stage[1]) })
    else if (found) pick?.(Number(found.dataset.pass))
  }
  svg.addEventListener("click", ({ target }) => press(target.closest("[data-tip]")))
  svg.addEventListener("keydown", ({ key }) => key === "Enter" && press(svg.querySelector(".tipped")))

  const show = (state, tell) => {
    const question = [shapeIn(state), layoutIn(state), state.sequence, gpuIn(state)]
    pick = null
    if (state.view === "step" && !drawStep) {
      computing(place, "picture")
      import("./step_memory.js").then(module => {
        ({ drawStep } = module)
        made.change()
      })
    } else ask(import.meta.url, place, ["memoryOfStages", ...question], every => {
      const said = facts(...question, every), totals = every.map(total), size = gpuIn(state).memory, { room } = memory
      const known = [["GPUs", said.gpus], ["sequences in a step", said.batch], ["fullest stage", said.fullest], ["needs", said.needs],
        ["limit", said.room], ["result", said.verdict]]
      const most = said.fullest.match(/\d+/)[0], needs = joined(`Stage ${most} needs ${said.needs.split(" = ")[1]}: ${said.verdict}. The limit is ${said.room}, because the allocator reserves more than the program allocates.`)
      const others = before => {
        tell(before)
        if (embedded(place)) return // its table is not shown
        ask(import.meta.url, place, ["compared", ...question], ({ others, best }) => {
          compare(others, "as it is", best, 2, "fastest")
          const next = !best ? "No single change makes it fit." : best === "as it is" ? "No single change that fits is faster."
            : joined(`The fastest single change that fits is “${best}”: ${others[best][0]}, and ${others[best][1]} for a step.`)
          tell(`${before} ${next}`)
        }, "table")
      }
      if (state.view === "step") {
        const index = state.stage === "fullest" ? Number(most) : state.stage
        ask(import.meta.url, place, ["step", ...question.slice(0, 3), index], found => {
          const draw = chosen => {
            const { moment, contains } = found.groups[chosen] ?? found
            drawStep(svg, widthOf(place), found, index, room * size, size, chosen)
            list([[chosen === undefined ? "fullest moment" : "chosen moment", `stage ${index}, ${moment}`], ["contains", contains], ...known])
            return joined(chosen === undefined ? `Stage ${index} needs the most memory in the ${moment}: ${contains.split(" = ")[1]}.` : `Stage ${index}, ${moment}: ${contains}.`)
          }
          others(draw())
          pick = chosen => tell(draw(chosen))
        })
        return
      }
      const longest = Math.max(size, ...totals)
      bars(svg, widthOf(place), every.map((parts, i) => [`stage ${i}`, inBytes(totals[i]), parts]), longest, inBytes,
        [[room * size, `limit: ${inBytes(room * size)}\u00a0`, "end dashed"], [size, `\u00a0${inBytes(size)}`, size < 0.8 * longest ? "start" : ""]])
      svg.setAttribute("aria-label", `A bar for each of ${every.length} stages, cut into its parts, and a line at the GPU's memory. Their lengths from stage 0 on: ${said.stages}.`)
      list(known)
      others(needs)
    })
    return ["python rank_memory.py", ...controls.map(({ name }) => `--${name} ${state[name]}`)].join(" ")
  }
  made = instrument(place, { controls, presets, show, output, demo: { name: "zero", beat: 1500 } })
}

for (const place of globalThis.document?.querySelectorAll("#memory.instrument") ?? []) start(place) // a worker has no document
