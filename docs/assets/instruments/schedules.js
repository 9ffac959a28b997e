// "Pipeline schedules": those of snippets/03_model_parallelism/schedules.py and pipeline_times.py,
// with times to change. tests/test_browser_instruments.py holds them together.
import { digits, element, fill, inSeconds, instrument, picture, widthOf } from "./base.js"
import { draggable, player } from "./moved.js"

const PARTS = 60 // positions of the cursor on the time axis
const NAMES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "v-half", "v-min", "dualpipe-v"]
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

// The path of one micro-batch is repeated every six units. Each F and B runs as early as its input and the limit of
// `most` live micro-batches allow. A W runs when neither an F nor a B can run.
const fromBlock = (p, m, most, starts) => {
  const first = (a, b) => (a[0] === b[0] ? 0 : a[0] - b[0]) || (a[1] < b[1] ? -1 : 1)
  const queues = upTo(p).map(r => {
    const begins = starts(r), steps = upTo(m).flatMap(i => begins.map((t, k) =>
      [t + 6 * i, k < 2 ? "F" : "B", i, k % 3 ? 2 * p - 1 - r : r])).sort(first)
    const [forwards, backwards] = ["F", "B"].map(kind => steps.filter(step => step[1] === kind))
    return [forwards, backwards, backwards.map(([, , ...where]) => [Infinity, "W", ...where])]
  })
  const ended = new Set(), schedule = upTo(p).map(() => []), live = upTo(p).map(() => 0)
  const arrived = ([, kind, micro, stage]) => {
    const needed = kind === "F" ? stage && ["F", micro, stage - 1] : kind === "W" ? ["B", micro, stage]
      : stage === 2 * p - 1 ? ["F", micro, stage] : ["B", micro, stage + 1]
    return !needed || ended.has(needed.join())
  }
  while (queues.flat().some(queue => queue.length)) {
    const round = queues.map((rank, r) => rank.filter(queue => queue.length && arrived(queue[0])
      && (queue[0][1] !== "F" || live[r] < 2 * most)).sort(([a], [b]) => first(a, b))[0]?.shift())
    round.forEach((step, r) => {
      if (!step) return
      const op = step.slice(1)
      live[r] += { F: 1, B: 0, W: -1 }[op[0]]
      schedule[r].push(op)
      ended.add(op.join())
    })
  }
  return schedule
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
  "v-half": (p, m) => fromBlock(p, m, Math.floor(p / 2) + 1, r => {
    const gap = p % 2 ? 0 : 3
    return [2 * r, 3 * p - 2 - r, 3 * p - 1 + gap + 2 * r, 6 * p - 2 + gap - r]
  }),
  "v-min": (p, m) => fromBlock(p, m, Math.floor((p + 4) / 3), r => {
    const gap = p % 3 ? 0 : 2
    return [r, 2 * p - 1 - r, 2 * p + gap + r, 4 * p - 1 + gap - r]
  }),
  "dualpipe-v": (p, m) => upTo(p).map(r => vee(p, r, [
    ...times(2 * (p - r - 1), "F0"), ...times(r + 1, "F0", "F1"), ...times(p - r - 1, "B1", "W", "F1"),
    ...times(m - 2 * p + r + 1, "F0", "b1", "F1", "b0"), ...times(p - r - 1, "b1", "F1", "b0"),
    ...times(r + 1, "b1", "b0").map((step, i) => i <= r ? step : step.toUpperCase()),
    ...times(p - r - 1, "W", "B0"), ...times(r + 1, "W")])),
}

const whyNot = (name, p, m) => {
  if (name === "interleaved" && m % p) return "needs a multiple of p micro-batches"
  if (name === "zb-v" && m < 2 * p - 1) return "needs at least 2p−1 micro-batches"
  if (name === "dualpipe-v" && m < 2 * p) return "needs at least 2p micro-batches"
}
// The same reason with its numbers: 2p−1 becomes 2p−1 = 15.
const inNumbers = (reason, p) => reason.replace(/2p−1|2p|p(?= micro)/, size => `${size} = ${{ "2p−1": 2 * p - 1, "2p": 2 * p, p }[size]}`)
const chunks = (name, v) => name === "interleaved" ? v : /^v-|-v$/.test(name) ? 2 : 1
const cutOf = ops => new Set(ops.filter(([kind]) => kind === "W").map(([, ...where]) => where.join()))

const kept = new Map()
const built = (name, ...sizes) => {
  const key = [name, ...sizes].join()
  if (!kept.has(key)) kept.set(key, BUILD[name](...sizes))
  return kept.get(key)
}

// Each rank's [operation, begin, end], in ticks: a tenth of a ms over the chunks of a rank.
export const timeline = (name, p, m, v, f, b, w, link, pace) => {
  const schedule = built(name, p, m, v), count = chunks(name, v), stages = p * count
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
  "v-half": "3(p−1)F/2 (F/2 less for odd p), if F = B = W and m ≥ p,",
  "v-min": "(2p−5/2)F (F more if 3 divides p), if F = B = W and m ≥ p,",
}
const formula = (name, p, m, v, f, b, w) => {
  const idle = {
    "interleaved": 2 * (p - 1) * (f + b + w), "zb-h1": 2 * v * (p - 1) * Math.max(0, f + b - w), "zb-v": v * (p - 1) * f,
    "v-half": v * (3 * (p - 1) - p % 2) * f, "v-min": v * (4 * p - 5 + (p % 3 ? 0 : 2)) * f,
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

// The operation of each rank when `at` sixtieths of the longest of these schedules have passed.
export const moment = (names, at, p, m, v, ...times) => {
  const lines = names.map(name => timeline(name, p, m, v, ...times)), scales = names.map(name => 12 / chunks(name, v))
  const length = Math.max(...lines.map((spans, i) => endOf(spans) * scales[i]))
  return {
    "time": inSeconds(length * at / PARTS / 120 / 1e3),
    "ranks": lines.map((spans, i) => spans.map(rank => {
      const now = rank.find(([, begin, end]) => begin * scales[i] * PARTS <= length * at && length * at < end * scales[i] * PARTS)
      return now ? `${now[0][0]}${now[0][1]}` : "idle"
    }).join(" ")),
  }
}

// ---- the page

const LABELS = { "gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "interleaved 1F1B", "zb-h1": "ZB-H1", "zb-v": "ZB-V",
  "v-half": "V-Half", "v-min": "V-Min", "dualpipe-v": "DualPipeV", "none": "none" }
const ms = value => `${value} ms`
const oneTo = n => upTo(n).map(i => i + 1)
const timesOf = name => ({ name, options: () => oneTo(30), first: 10, text: ms, slider: true })
export const controls = [
  { name: "schedule", label: "schedule", options: () => NAMES, first: "1f1b", main: true, text: name => LABELS[name] },
  { name: "ranks", label: "number of ranks (pipeline stages), p", options: () => [2, 3, 4, 5, 6, 7, 8], first: 4, slider: true, main: true },
  { name: "micro-batches", label: "number of micro-batches, m", first: 8, slider: true, main: true,
    options: ({ schedule, ranks }) => oneTo(24).filter(m => !whyNot(schedule, ranks, m)) },
  { name: "other", label: "second schedule, to compare", first: "zb-v", main: true, text: name => LABELS[name],
    options: () => ["none", ...NAMES] },
  { name: "chunks", label: "chunks on each rank, v", options: ({ schedule }) => schedule === "interleaved" ? [2, 3, 4] : [2], first: 2, slider: true },
  { ...timesOf("forward"), label: "time of a forward pass, F" },
  { ...timesOf("backward"), label: "time of the gradients of activations, B" },
  { ...timesOf("weights"), label: "time of the gradients of weights, W" },
  { name: "link", label: "time of a message between ranks", options: () => upTo(21), first: 0, text: ms, slider: true },
  ...upTo(8).map(r => ({
    name: `rank-${r}`, label: `time on rank ${r} is multiplied by`, first: 10, slider: true, text: value => `× ${value / 10}`,
    options: ({ ranks }) => r < ranks ? oneTo(20).slice(4) : [10],
  })),
  { name: "at", label: "time of the cursor", options: () => upTo(PARTS + 1), first: PARTS, slider: true, at: true,
    text: (at, state) => at === PARTS ? "whole step" : moment(shown(state), at, ...caseOf(state).slice(1)).time },
]
const presets = [
  { name: "4 ranks, 8 micro-batches", values: {} },
  { name: "one slow rank", values: { "rank-2": 15 } },
  { name: "a link that is too slow", values: { link: 8, other: "gpipe" } },
  { name: "8 ranks, 16 micro-batches", values: { ranks: 8, "micro-batches": 16 } },
  { name: "less memory: V-Half and V-Min", values: { schedule: "v-half", other: "v-min", "micro-batches": 12 } },
]
const paceOf = state => upTo(state.ranks).map(r => state[`rank-${r}`])
const caseOf = state => [state.schedule, state.ranks, state["micro-batches"], state.chunks, state.forward,
  state.backward, state.weights, state.link, paceOf(state)]

const missing = ({ other, ranks, "micro-batches": m }) => other !== "none" && whyNot(other, ranks, m)
const shown = state => [state.schedule, ...["none", state.schedule].includes(state.other) || missing(state) ? [] : [state.other]]

const KINDS = { F: "forward pass", B: "backward pass", W: "weight gradients" }

// Draws one schedule or two on one time axis. Returns a function that moves the cursor to a part of this axis.
const draw = (svg, width, state) => {
  const names = shown(state), p = state.ranks, times = caseOf(state).slice(1)
  const panels = names.map(name => ({ name, spans: timeline(name, ...times), count: chunks(name, state.chunks) }))
  const lengths = panels.map(({ spans, count }) => endOf(spans) / (10 * count)), longest = Math.max(...lengths)
  const narrow = width < 480, left = narrow ? 52 : 86, across = width - left - 2
  // On a phone, a finger needs 24 pixels for a handle. The second schedule has none, so its rows can be lower.
  const high = (narrow ? 0.36 : 0.6) * innerHeight - (narrow ? 34 : 64) - 22 * names.length - (missing(state) ? 20 : 0)
  const tallest = Math.max(narrow ? 24 : 19, Math.min(42, Math.floor(high / (p * names.length))))
  const heights = [tallest, narrow ? Math.max(12, Math.min(tallest, Math.floor(high / p) - tallest)) : tallest]
  const x = time => left + time / longest * across
  const most = Math.max(...panels.map(({ spans, count }) => Math.max(...spans.map(rank => Math.max(...live(rank)))) / count))
  const out = [], kinds = new Set(panels.flatMap(({ spans }) => spans.flat().map(([[kind]]) => kind)))
  const later = panels.some(({ count }) => count > 1)

  // On a phone, the legend comes first, because only the lower part of the picture stays in view.
  let line = 0
  const legend = () => {
    let from = 0
    for (const [look, words] of [["op-F", "forward"], ["op-B", kinds.has("W") ? narrow ? "backward, B" : "backward (only the part B where W is separate)" : "backward"],
      ...kinds.has("W") ? [["op-W", "weight gradients, W"]] : [], ...later ? [["op-F later", narrow ? "lighter: later chunk" : "lighter: a later chunk of the rank"]] : [],
      ["live", narrow ? "micro-batches held" : "micro-batches that the rank holds"], ["pace", narrow ? "drag ‹×1›: slower rank" : "time of a rank: drag ‹×1› sideways"]]) {
      const wide = 28 + 5.8 * words.length
      if (from && from + wide > width) [from, line] = [0, line + 16]
      out.push(`<rect x="${from + 1}" y="${line}" width="12" height="10" class="${look}"/>`,
        `<text x="${from + 17}" y="${line + 9}" class="start soft">${words}</text>`)
      from += wide
    }
  }
  if (narrow) legend()
  const begins = narrow ? line + 18 : 2
  let top = begins
  panels.forEach(({ name, spans, count }, panel) => {
    const at = ticks => x(ticks / (10 * count)), round = ticks => digits(ticks / (10 * count))
    out.push(`<text x="0" y="${top + 11}" class="start title">${LABELS[name]}: ${inSeconds(lengths[panel] / 1e3)}, ${percent(...shareIdle(spans))} idle</text>`)
    top += 18
    const row = heights[panel], bar = Math.round(row * 0.58), area = row - bar - (row < 20 ? 2 : 4)
    // If one operation is too small for its number, no operation of this kind shows a number.
    const small = new Set(spans.flat().filter(([[, micro], begin, end]) => at(end) - at(begin) <= 8 + 6 * (micro > 9)).map(([[kind]]) => kind))
    spans.forEach((rank, r) => {
      const floor = top + bar + area, middle = top + bar / 2 + 4, slow = state[`rank-${r}`] / 10
      out.push(`<text x="0" y="${middle}" class="start soft">${narrow ? r : `rank ${r}`}</text>`,
        `<path d="M${left} ${top + bar}H${width - 2}" class="line"/>`)
      if (!panel) {
        out.push(`<rect x="${left - 42}" y="${top + bar / 2 - 8}" width="39" height="16" rx="8" class="pace" data-tip="rank ${r}: all times × ${slow}. Drag to the right to make it slower"/>`,
          `<text x="${left - 22.5}" y="${middle}" class="soft on">‹×${slow}›</text>`)
      }
      const held = live(rank)
      let path = `M${left} ${floor}`
      rank.forEach(([[kind, micro, stage], begin, finish], i) => {
        const [from, wide] = [at(begin), at(finish) - at(begin)]
        const tone = 1 - 0.35 * Math.floor(stage / p) / Math.max(1, count - 1)
        out.push(`<rect x="${from.toFixed(2)}" y="${top}" width="${Math.max(0.5, wide - 0.7).toFixed(2)}" height="${bar - 2}" class="op-${kind}" opacity="${tone.toFixed(2)}" data-from="${begin / (10 * count)}" data-to="${finish / (10 * count)}" data-tip="${LABELS[name]}, rank ${r}, ${KINDS[kind]} of micro-batch ${micro}${count > 1 ? `, chunk ${stage}` : ""}: ${round(begin)} to ${round(finish)} ms"/>`)
        if (!small.has(kind) && bar > 12) out.push(`<text x="${(from + wide / 2).toFixed(2)}" y="${top + bar / 2 + 3}" class="on">${micro}</text>`)
        path += `H${at(kind === "F" ? begin : finish).toFixed(2)}V${(floor - held[i] / count / most * (area - 1)).toFixed(2)}`
      })
      out.push(`<path d="${path}H${at(endOf(spans)).toFixed(2)}V${floor}Z" class="live"/>`)
      if (!panel) out.push(`<rect x="0" y="${top}" width="${width - 2}" height="${row - 1}" class="grip" data-drag="rank-${r}"/>`)
      top += row
    })
    top += 4
  })
  if (missing(state)) {
    out.push(`<text x="0" y="${top + 11}" class="start title">${LABELS[state.other]} ${inNumbers(missing(state), p)}</text>`)
    top += 20
  }
  const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000].find(each => longest / each <= across / 60) ?? 5000
  for (let time = 0; time <= longest; time += step) {
    out.push(`<text x="${x(time).toFixed(1)}" y="${top + 10}" class="${time ? "end" : "start"} soft">${time}${time ? "" : " ms"}</text>`)
  }
  out.push(`<path d="M0 ${begins}V${top}" class="cursor"/>`)
  line = top + 20
  if (!narrow) legend()
  fill(svg, width, narrow ? top + 14 : line + 14, out.join(""))
  const cursor = svg.querySelector(".cursor"), shapes = [...svg.querySelectorAll("[data-from]")]
    .map(shape => [shape, Number(shape.dataset.from), Number(shape.dataset.to)])
  return part => {
    const time = part * longest
    cursor.setAttribute("transform", `translate(${x(time).toFixed(1)} 0)`)
    cursor.style.display = part < 1 ? "" : "none"
    for (const [shape, begin, end] of shapes) shape.classList.toggle("now", part < 1 && begin <= time && time < end)
  }
}

export const start = place => {
  const bar = element("div", { class: "instrument-foot" })
  const { svg, list, compare, output } = picture("All schedules, with these times",
    ["schedule", "time of a step", "idle time (bubble)", "most micro-batches that a rank holds"])
  let drawn, said, move
  const show = (state, tell) => {
    const { schedule, ranks, at } = state, names = shown(state), times = caseOf(state)
    const key = [names, state.other, times, widthOf(place), innerHeight, document.body.dataset.mdColorScheme].join()
    if (key !== drawn) {
      drawn = key
      said = facts(...times)
      move = draw(svg, widthOf(place), state)
      compare(Object.fromEntries(Object.entries(said.others).map(([name, cells]) => [LABELS[name], cells.length > 1 ? cells : [inNumbers(cells[0], ranks)]])),
        LABELS[schedule], LABELS[said.shortest], 0, "shortest")
    }
    move(at / PARTS)
    const now = at < PARTS && moment(names, at, ...times.slice(1))
    const whole = names.map(name => `A step of ${LABELS[name]} takes ${said.others[name][0]}, and the ranks are idle for ${said.others[name][1]} of this time.`).join(" ")
    const busy = now && names.map((name, i) => `${now.ranks[i].split(" ").filter(each => each !== "idle").length} of ${ranks} ranks with ${LABELS[name]}`).join(" and ")
    tell(now ? `After ${now.time}, ${busy} are computing.` : whole)
    svg.setAttribute("aria-label", `The operations of ${ranks} ranks on a time axis, and under each rank how many micro-batches it holds. ${whole} ${now ? `The cursor is at ${now.time}. From rank 0 on, the operations of ${LABELS[schedule]} are ${now.ranks[0]}.` : `From rank 0 on, the largest numbers of micro-batches that the ranks hold with ${LABELS[schedule]} are ${said.live}.`}`)
    list([["time of a step", said.time], ["idle time (bubble)", said.bubble], ["bubble by the formula", said.formula],
      [`most micro-batches held by ranks ${upTo(ranks).join(", ")}`, said.live],
      ...now ? names.map((name, i) => [`operations at the cursor, ${LABELS[name]}, from rank 0 on`, now.ranks[i]]) : []])
    return ["python pipeline_times.py", `--schedule ${schedule}`, ...names[1] ? [`--other ${names[1]}`] : [],
      `--ranks ${ranks}`, `--micro-batches ${state["micro-batches"]}`,
      `--chunks ${state.chunks}`, `--forward ${state.forward}`, `--backward ${state.backward}`, `--weights ${state.weights}`,
      `--link ${state.link}`, `--pace ${paceOf(state).join()}`, ...now ? [`--at ${at}`] : []].join(" ")
  }
  const made = instrument(place, { controls, presets, show, output, bar })
  const { state, change } = made
  player(place, bar, "at", made, () => PARTS, part => move((state.at + part) / PARTS))
  let first
  draggable(svg, made, (name, x, began) => { // twelve pixels are a tenth
    if (x === began) first = state[name]
    const pace = Math.max(5, Math.min(20, first + Math.round((x - began) / 12)))
    if (pace !== state[name]) change({ [name]: pace })
  })
}

for (const place of document.querySelectorAll("#schedules.instrument")) start(place)
