// "Pipeline schedules": those of snippets/03_model_parallelism/schedules.py and pipeline_times.py,
// with times to change. tests/test_browser_instruments.py holds them together.
import { digits, fill, inSeconds, instrument, picture, widthOf } from "./base.js"
import { draggable } from "./moved.js"

const NAMES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"]
const upTo = n => [...Array(Math.max(0, n)).keys()]
const times = (n, ...steps) => upTo(n).flatMap(() => steps)

// ---- schedules: each rank's operations [kind, micro-batch, stage]. A B without a W of its own is whole.

const alternate = (n, warmUp, place) => [
  ...upTo(warmUp).map(i => place("F", i)),
  ...upTo(n).flatMap(i => [...(warmUp + i < n ? [place("F", warmUp + i)] : []), place("B", i)])]

const oneFOneB = (p, m) => upTo(p).map(r => alternate(m, Math.min(p - 1 - r, m), (kind, i) => [kind, i, r]))

// The micro-batches of "F0 F1 B1 W1 …" in turn, on a rank with the chunks r and 2p-1-r.
const vee = (p, r, steps) => {
  const done = {}, waiting = []
  return steps.map(step => {
    if (step === "W") {
      const [, micro, stage] = waiting.shift()
      return ["W", micro, stage]
    }
    const kind = step[0].toUpperCase(), key = kind + step[1]
    const op = [kind, done[key] ?? 0, step[1] === "0" ? r : 2 * p - 1 - r]
    done[key] = op[1] + 1
    if (step[0] === "B") waiting.push(op)
    return op
  })
}

const BUILD = {
  "gpipe": (p, m) => upTo(p).map(r => ["F", "B"].flatMap(kind => upTo(m).map(i => [kind, i, r]))),
  "1f1b": oneFOneB,
  "interleaved": (p, m, v) => upTo(p).map(r => alternate(m * v, Math.min(2 * (p - 1 - r) + (v - 1) * p, m * v), (kind, i) => {
    const chunk = Math.floor(i / p) % v
    return [kind, Math.floor(i / (p * v)) * p + i % p, (kind === "F" ? chunk : v - 1 - chunk) * p + r]
  })),
  "zb-h1": (p, m) => oneFOneB(p, m).map((ops, r) => [
    ...ops.flatMap(op => op[0] === "B" && op[1] >= r ? [op, ["W", op[1] - r, r]] : [op]),
    ...upTo(Math.min(m, r)).map(i => ["W", Math.max(m - r, 0) + i, r])]),
  "zb-v": (p, m) => upTo(p).map(r => vee(p, r, [
    ...times(2 * (p - r) - 1, "F0"), ...times(r, "F1", "F0"), ...times(p - r, "F1", "B1", "W1"),
    ...times(m - 2 * p + 1 + r, "F0", "B0", "W0", "F1", "B1", "W1"), ...times(p - 1 - r, "B0", "W0", "F1", "B1", "W1"),
    ...times(r, "B0", "B1"), ...times(p - r, "B0", "W0"), ...times(r, "W1"), ...times(r, "W0")])),
  "dualpipe-v": (p, m) => upTo(p).map(r => vee(p, r, [
    ...times(2 * (p - r - 1), "F0"), ...times(r + 1, "F0", "F1"), ...times(p - r - 1, "B1", "W", "F1"),
    ...times(m - 2 * p + r + 1, "F0", "b1", "F1", "b0"), ...times(p - r - 1, "b1", "F1", "b0"),
    ...times(r + 1, "b1", "b0").map((step, i) => i <= r ? step : step.toUpperCase()),
    ...times(p - r - 1, "W", "B0"), ...times(r + 1, "W")])),
}

const whyNot = (name, p, m) => {
  if (name === "interleaved" && m % p) return "needs a multiple of p micro-batches"
  if (name === "zb-v" && m < 2 * p - 1) return "needs 2p−1 micro-batches"
  if (name === "dualpipe-v" && m < 2 * p) return "needs 2p micro-batches"
}
const chunks = (name, v) => ({ "interleaved": v, "zb-v": 2, "dualpipe-v": 2 })[name] ?? 1
const cutOf = ops => new Set(ops.filter(([kind]) => kind === "W").map(([, ...where]) => where.join()))

// Each rank's [operation, begin, end], in ticks: a tenth of a ms over the chunks of a rank.
export const timeline = (name, p, m, v, f, b, w, link, pace) => {
  const schedule = BUILD[name](p, m, v), count = chunks(name, v), stages = p * count
  const owner = new Map(schedule.flatMap((ops, r) => ops.map(([, , stage]) => [stage, r])))
  const cut = cutOf(schedule.flat()), ended = new Map()
  const needs = ([kind, micro, stage]) => {
    if (kind === "F") return stage ? ["F", micro, stage - 1] : null
    if (kind === "W") return ["B", micro, stage]
    return stage === stages - 1 ? ["F", micro, stage] : ["B", micro, stage + 1]
  }
  const spans = schedule.map(() => []), free = schedule.map(() => 0)
  for (let moved = true; moved;) {
    moved = false
    schedule.forEach((ops, r) => {
      while (spans[r].length < ops.length) {
        const op = ops[spans[r].length], needed = needs(op)
        if (needed && !ended.has(needed.join())) break
        const late = needed && owner.get(needed[2]) !== r ? 10 * count * link : 0
        const begin = Math.max(free[r], needed ? ended.get(needed.join()) + late : 0)
        const whole = op[0] === "B" && !cut.has(op.slice(1).join())
        free[r] = begin + { F: f, B: b + (whole ? w : 0), W: w }[op[0]] * pace[r]
        ended.set(op.join(), free[r])
        spans[r].push([op, begin, free[r]])
        moved = true
      }
    })
  }
  return spans
}

// Live chunks of a rank after each of its operations: from F to W, or to a whole B.
const live = spans => {
  const cut = cutOf(spans.map(([op]) => op))
  let now = 0
  return spans.map(([[kind, ...where]]) => {
    if (kind === "F") now += 1
    else if (kind === "W" || !cut.has(where.join())) now -= 1
    return now
  })
}

const endOf = spans => Math.max(...spans.flat().map(([, , end]) => end))
const shareIdle = spans => {
  const every = spans.length * endOf(spans)
  return [every - spans.flat().reduce((busy, [, begin, end]) => busy + end - begin, 0), every]
}

const FORMULAS = {
  "gpipe": "(p−1)(F+B+W)", "1f1b": "(p−1)(F+B+W)", "interleaved": "(p−1)(F+B+W)/v",
  "zb-h1": "(p−1)(F+B−W), if F = B = W,", "zb-v": "(p−1)F/2, if F = B = W,",
}
const formula = (name, p, m, v, f, b, w) => {
  const idle = {
    "interleaved": 2 * (p - 1) * (f + b + w), "zb-h1": 2 * v * (p - 1) * Math.max(0, f + b - w), "zb-v": v * (p - 1) * f,
  }[name] ?? 2 * v * (p - 1) * (f + b + w)
  return [idle, 2 * v * m * (f + b + w) + idle]
}
const percent = (part, whole) => `${(Math.floor((2000 * part + whole) / (2 * whole)) / 10).toFixed(1)}%`

export const facts = (name, p, m, v, f, b, w, link, pace) => {
  const others = {}, lengths = {}
  let each = ""
  for (const other of NAMES) {
    const reason = whyNot(other, p, m)
    if (reason) {
      others[other] = [reason]
      continue
    }
    const spans = timeline(other, p, m, v, f, b, w, link, pace), count = chunks(other, v)
    const most = spans.map(rank => Math.max(...live(rank)) / count)
    lengths[other] = endOf(spans) / (10 * count) / 1e3
    others[other] = [inSeconds(lengths[other]), percent(...shareIdle(spans)), digits(Math.max(...most))]
    if (other === name) each = most.map(digits).join(" ")
  }
  return {
    "time": others[name][0],
    "bubble": others[name][1],
    "formula": FORMULAS[name] ? `${FORMULAS[name]} idle, ${percent(...formula(name, p, m, v, f, b, w))}` : "none in the chapter",
    "live": each,
    others,
    "shortest": Object.keys(lengths).reduce((best, other) => lengths[other] < lengths[best] ? other : best),
  }
}

// ---- the page

const ms = value => `${value} ms`
const oneTo = n => upTo(n).map(i => i + 1)
const timesOf = name => ({ name, options: () => oneTo(30), first: 10, text: ms, slider: true })
export const controls = [
  { name: "schedule", label: "schedule", options: () => NAMES, first: "1f1b", main: true },
  { name: "ranks", label: "number of ranks, p", options: () => [2, 3, 4, 5, 6, 7, 8], first: 4, slider: true, main: true },
  { name: "micro-batches", label: "number of micro-batches, m", first: 8, slider: true, main: true,
    options: ({ schedule, ranks }) => oneTo(24).filter(m => !whyNot(schedule, ranks, m)) },
  { name: "chunks", label: "chunks in a rank, v", options: ({ schedule }) => schedule === "interleaved" ? [2, 3, 4] : [2], first: 2, slider: true },
  { ...timesOf("forward"), label: "time of a forward pass, F" },
  { ...timesOf("backward"), label: "time of the gradients of activations, B" },
  { ...timesOf("weights"), label: "time of the gradients of weights, W" },
  { name: "link", label: "time of a message between ranks", options: () => upTo(21), first: 0, text: ms, slider: true },
  ...upTo(8).map(r => ({
    name: `rank-${r}`, label: `time on rank ${r} is multiplied by`, first: 10, slider: true, text: value => `× ${value / 10}`,
    options: ({ ranks }) => r < ranks ? oneTo(20).slice(4) : [10],
  })),
]
const presets = [
  { name: "4 ranks, 8 micro-batches", values: {} },
  { name: "one slow rank", values: { "rank-2": 15 } },
  { name: "a link that is too slow", values: { link: 8 } },
  { name: "8 ranks, 16 micro-batches", values: { ranks: 8, "micro-batches": 16 } },
]
const paceOf = state => upTo(state.ranks).map(r => state[`rank-${r}`])
const caseOf = state => [state.schedule, state.ranks, state["micro-batches"], state.chunks, state.forward,
  state.backward, state.weights, state.link, paceOf(state)]

const KINDS = { F: "forward", B: "backward", W: "weight gradients" }

const draw = (svg, width, state) => {
  const spans = timeline(...caseOf(state)), end = endOf(spans), p = state.ranks
  const left = 44, right = 2, bar = 24, area = 16, row = bar + area + 8, across = width - left - right
  const count = chunks(state.schedule, state.chunks)
  const x = ticks => left + ticks / end * across
  const round = ticks => digits(ticks / (10 * count))
  const most = Math.max(...spans.map(rank => Math.max(...live(rank))))
  const out = []
  spans.forEach((rank, r) => {
    const top = r * row + 4
    out.push(`<text x="0" y="${top + 16}" class="start soft">rank ${r}</text>`,
      `<path d="M${left} ${top + bar}H${width - right}" class="line"/>`)
    const held = live(rank)
    let path = `M${left} ${top + bar + area}`
    rank.forEach(([[kind, micro, stage], begin, finish], i) => {
      const [from, wide] = [x(begin), x(finish) - x(begin)]
      const tone = 1 - 0.35 * Math.floor(stage / p) / Math.max(1, count - 1)
      out.push(`<rect x="${from.toFixed(2)}" y="${top}" width="${Math.max(0.5, wide - 0.7).toFixed(2)}" height="${bar - 2}" class="op-${kind}" opacity="${tone.toFixed(2)}" data-tip="rank ${r}, ${KINDS[kind]} of micro-batch ${micro}${count > 1 ? `, stage ${stage}` : ""}: ${round(begin)} to ${round(finish)} ms"/>`)
      if (wide > 8 + 6 * (micro > 9)) out.push(`<text x="${(from + wide / 2).toFixed(2)}" y="${top + 15}" class="on">${micro}</text>`)
      const at = x(kind === "F" ? begin : finish).toFixed(2)
      path += `H${at}V${(top + bar + area - held[i] / most * (area - 2)).toFixed(2)}`
    })
    out.push(`<path d="${path}H${width - right}V${top + bar + area}Z" class="live"/>`,
      `<rect x="${left}" y="${top}" width="${across}" height="${row - 4}" class="grip" data-drag="rank-${r}"/>`)
  })
  const foot = p * row + 16
  const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000].find(each => end / (10 * count) / each <= across / 60) ?? 5000
  for (let at = 0; at <= end / (10 * count); at += step) {
    out.push(`<text x="${x(at * 10 * count).toFixed(1)}" y="${foot}" class="${at ? "end" : "start"} soft">${at}${at ? "" : " ms"}</text>`)
  }
  const height = foot + 28
  let at = left
  for (const [kind, words] of [["F", "forward"], ["B", "backward"], ["W", "weights"], ["", "live"]]) {
    out.push(`<rect x="${at}" y="${height - 14}" width="12" height="10" class="${kind ? `op-${kind}` : "live"}"/>`,
      `<text x="${at + 16}" y="${height - 5}" class="start soft">${words}</text>`)
    at += 26 + 6.4 * words.length
  }
  fill(svg, width, height, out.join(""))
}

export const start = place => {
  const { svg, list, compare, output } = picture("All schedules, with these times",
    ["schedule", "step", "bubble", "most live"])
  const show = (state, tell) => {
    const said = facts(...caseOf(state)), { schedule, ranks } = state
    draw(svg, widthOf(place), state)
    tell(`A step of ${schedule} takes ${said.time}, ${said.bubble} of it idle. Rank 0 holds ${said.live.split(" ")[0]} micro-batches at most.`)
    svg.setAttribute("aria-label", `The operations of ${ranks} ranks on a line of ${said.time}, and under each rank how many micro-batches it holds. Most live, from rank 0 on: ${said.live}.`)
    const rows = [["step", said.time], ["bubble", said.bubble], ["bubble by the formula", said.formula], ["most live, rank 0…", said.live]]
    list(rows)
    compare(said.others, schedule, said.shortest, 0, "shortest")
    return ["python pipeline_times.py", `--schedule ${schedule}`, `--ranks ${ranks}`, `--micro-batches ${state["micro-batches"]}`,
      `--chunks ${state.chunks}`, `--forward ${state.forward}`, `--backward ${state.backward}`, `--weights ${state.weights}`,
      `--link ${state.link}`, `--pace ${paceOf(state).join()}`].join(" ")
  }
  const { state, change } = instrument(place, { controls, presets, show, output, demo: { name: "schedule", beat: 1500 } })
  let first
  draggable(svg, (name, x, began) => { // twelve pixels are a tenth
    if (x === began) first = state[name]
    const pace = Math.max(5, Math.min(20, first + Math.round((x - began) / 12)))
    if (pace !== state[name]) change({ [name]: pace })
  })
}

for (const place of document.querySelectorAll("#schedules.instrument")) start(place)
