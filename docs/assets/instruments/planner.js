// The search of snippets/planner/plan.py, and what it prints.
import { computing, drawing, element, instrument, joined, picture, upTo, widthOf } from "./base.js"
import {
  ask, bars, closedForm, flopsPerToken, GIB, gpuIn, memory, over, powers, shapeIn,
  tables, total, traffic,
} from "./layouts.js"
import { called, fixed, fullestOf, timedLayouts } from "./timed_layouts.js"

const grouped = text => text.replace(/\B(?=(\d{3})+$)/g, ",")
const percent = x => `${fixed(100 * x)}%`

// ---- the search

const CLOSE = 6, NEAREST = 3 // 3 of the 6 that nearly fit are shown

const search = (s, gpus, sequence, batch, gpu, wanted) => {
  const timed = timedLayouts(s, gpus, sequence, batch, gpu)
  const fit = [], rejected = [], room = memory.room * gpu.memory
  const weighed = each => (each.fullest = fullestOf(s, each.layout, sequence)).needed
  for (const each of timed) {
    if (fit.length >= wanted) break
    each.least = total(closedForm(s, each.layout, sequence, 0))
    if (each.least <= room) each.least = weighed(each)
    ;(each.least <= room ? fit : rejected).push(each)
  }
  const byNeed = (a, b) => a.least - b.least, close = rejected.sort(byNeed).slice(0, CLOSE)
  for (const each of close) if (!each.fullest) each.least = weighed(each)
  const nearest = close.sort(byNeed).slice(0, NEAREST)
  return { fit, nearest, count: timed.length }
}

const remedy = (part, l) => {
  const stage = ["optimizer", "gradients", "parameters"].indexOf(part) + 1
  if (stage) return l.zero >= stage || l.dp * l.cp === 1 ? "more GPUs or smaller optimizer states" : `more TP or PP, or ZeRO-${stage}`
  if (part === "logits") return "a chunked loss or more TP"
  return [l.recompute !== "layer" && "recomputation", l.micro_batch > 1 && "a smaller micro-batch", "more TP or CP"].filter(Boolean).join(", or ")
}

const explain = (s, { layout, step, fullest }, sequence, gpu) => {
  const parts = Object.entries(fullest.parts).filter(([, size]) => size)
  const spent = Object.entries(step.parts).sort((a, b) => b[1] - a[1]).filter(([, x]) => x > 0.005 * step.seconds)
  return [
    [`memory of stage ${fullest.stage}, GiB`, `${fixed(fullest.needed / GIB, 1)} = ${parts.map(([name, size]) => `${name} ${fixed(size / GIB, 1)}`).join(", ")}`],
    ...Object.entries(traffic(s, layout, sequence, gpu.node)).map(([name, sent]) => [`${name} over ${sent.ranks} ranks`,
      `sends ${fixed(sent.bytes / 1e9, 1)} GB a step ${sent.in_node === sent.ranks ? "inside a node" : "between nodes"}`]),
    [`${fixed(step.seconds, 2)} s a step`, spent.map(([name, x]) => `${name} ${percent(x / step.seconds)}`).join(", ")],
  ]
}

const whyRejected = ({ layout, step, fullest }, gpu) => {
  const much = fullest.needed - memory.room * gpu.memory
  const [part, size] = Object.entries(fullest.parts).reduce((most, each) => each[1] > most[1] ? each : most)
  return `${called(layout)}, ${fixed(step.seconds, 2)} s: ${fixed(much / GIB, 1)} GiB too much on stage ${fullest.stage}, ` +
    `most of it ${part} (${fixed(size / GIB, 1)}); try ${remedy(part, layout)}`
}

export const plan = (s, gpus, sequence, batch, gpu, wanted) => {
  const { fit, nearest, count } = search(s, gpus, sequence, batch, gpu, wanted), tokens = batch * sequence
  return {
    count,
    rows: fit.map(({ layout, step, fullest }) => ({
      name: called(layout), parts: step.parts, layout,
      cells: [`${fixed(step.seconds, 2)} s`, grouped(fixed(tokens / step.seconds / gpus)),
        percent(flopsPerToken(s, sequence) * tokens / step.seconds / gpus / gpu.flops),
        percent(step.parts.bubble / step.seconds), `${fixed(fullest.needed / GIB, 1)} GiB`],
    })),
    first: fit.length ? explain(s, fit[0], sequence, gpu) : [],
    nearest: nearest.map(each => whyRejected(each, gpu)),
  }
}
// The numbers of the map, for the worker: later imports are not needed for the first result.
export const map = async (...given) => (await import("./layout_map.js")).layoutMap(...given)

// ---- the page

const tokens = n => n < 2 ** 20 ? `${n / 2 ** 10}K` : `${n / 2 ** 20}M`
const COLUMNS = ["a step", "tokens/s/GPU", "MFU", "bubble", "memory"]
const number = text => parseFloat(text.replaceAll(",", ""))

export const controls = [
  { name: "model", label: "model", options: () => Object.keys(tables.models), first: "llama-3-70b", main: true },
  { name: "gpu", label: "kind of GPU", options: () => Object.keys(tables.hardware), first: "h100" },
  { name: "gpus", label: "number of GPUs", options: () => powers(0, 12), first: 256, slider: true, main: true },
  { name: "sequence", label: "tokens in a sequence", options: () => powers(10, 17), first: 8192, text: tokens, slider: true },
  { name: "batch", label: "tokens in a step", first: 2 ** 22, text: tokens, slider: true, main: true,
    options: ({ sequence }) => powers(17, 26).filter(n => n >= sequence) },
  { name: "emit", label: "launch command for", options: () => ["megatron", "torchtitan", "deepspeed", "fsdp"], first: "megatron" },
  { name: "top", label: "number of layouts in the list", options: () => [3, 5, 10, 20], first: 5 },
  { name: "sort", label: "list sorted by", options: () => COLUMNS, first: COLUMNS[0] },
]

const presets = [
  { name: "Llama 3 70B on 256 H100", values: {} },
  { name: "Llama 3 70B on 64 H100, 1M tokens in a step", values: { gpus: 64, batch: 2 ** 20 } },
  { name: "Llama 3 8B on 8 H100, 512K tokens in a step", values: { model: "llama-3-8b", gpus: 8, batch: 2 ** 19 } },
]

export const start = place => {
  const { box, svg: strips } = drawing("Seconds of a step by activity")
  const cards = element("ol", { class: "instrument-cards" })
  const { svg, table, list, output } = picture("Fastest layout for each number of tensor-parallel ranks and pipeline stages", COLUMNS, { below: [cards, box] })
  table.remove()
  let made, tools, known, found, cells, now, say
  cards.addEventListener("click", async ({ target }) => {
    if (!target.value) return
    const { name, layout } = found.rows[target.value], { launch } = await import("./launch.js")
    const text = launch(now.emit, now.model, shapeIn(now), layout, now.sequence, gpuIn(now), name)
    if (text.startsWith("--emit: ")) return say(text.slice(8))
    navigator.clipboard?.writeText(text).then(() => say(`The launch command of ${name} is copied.`), () => say(text))
  })

  const draw = state => {
    const { rows, first, nearest, count } = found, by = COLUMNS.indexOf(state.sort), down = by === 1 || by === 2 ? -1 : 1
    const order = upTo(rows.length).sort((a, b) => down * (number(rows[a].cells[by]) - number(rows[b].cells[by])))
    const { drawMap, inWords } = tools
    cards.replaceChildren(...order.map(i => element("li", {}, element("b", {}, inWords(rows[i].layout)),
      element("dl", {}, ...COLUMNS.map((name, k) => element("div", {}, element("dt", {}, name), element("dd", {}, joined(rows[i].cells[k]))))),
      element("button", { type: "button", value: i, class: "md-button", "aria-label": `Copy the launch command of layout ${i + 1}` }, "Copy launch command"))))
    if (cells) drawMap(svg, widthOf(place), cells, state)
    box.hidden = !rows.length
    if (rows.length) {
      bars(strips, widthOf(place), order.map((i, k) => [`layout ${k + 1}`, rows[i].cells[0], rows[i].parts]), Math.max(...rows.map(row => number(row.cells[0]))), x => `${fixed(x, 2)} s`)
    }
    strips.setAttribute("aria-label", `A bar for each layout: the seconds of a step, by activity. ${first.at(-1)?.join(": ") ?? ""}`)
    const none = `none of ${count} layouts fits; plan.py prints what to change`
    list([["found", rows.length ? `${rows.length} of ${count} layouts` : none], ...first,
      ...nearest.slice(0, 1).map(line => ["nearest that does not fit", line])])
    const { layout, cells: values } = rows[order[0]] ?? {}
    say(rows.length ? `${order[0] ? `The first layout in the list, sorted by ${state.sort}` : "The fastest layout that fits"}: ${inWords(layout)}. A step takes ${joined(values[0])}, and a GPU needs ${joined(values[4])}.`
      : `None of the ${count} layouts fits.`)
  }

  const show = (state, tell) => {
    const { model, gpu, gpus, sequence, batch, emit, top } = state
    const task = [shapeIn(state), gpus, sequence, over(batch, sequence), gpuIn(state)], key = JSON.stringify([task, top])
    now = state
    say = tell
    if (!tools) {
      computing(place, "picture")
      import("./layout_map.js").then(module => {
        tools = module
        made.change()
      })
    } else if (known === key) draw(state)
    else {
      ask(import.meta.url, place, ["plan", ...task, top], answer => {
        known = key
        found = answer
        cells = null
        draw(state)
        ask(import.meta.url, place, ["map", ...task], answer => {
          cells = answer
          draw(state)
        })
      })
    }
    return `python plan.py --model ${model} --gpus ${gpus} --gpu ${gpu} --sequence ${sequence} --batch ${batch} --top ${top} --emit ${emit}`
  }
  made = instrument(place, { controls, presets, show, output, demo: { name: "gpus", values: [64, 128, 256, 512, 1024], beat: 3000 } })
}

for (const place of globalThis.document?.querySelectorAll("#planner.instrument") ?? []) start(place)
