// "Roofline": the points of snippets/planner/roofs.py under the roof of a GPU, with sizes to drag.
// tests/test_browser_instruments.py holds the two together.
import { digits, fill, inBytes, inSeconds, instrument, picture, widthOf } from "./base.js"
import { draggable } from "./moved.js"

const tables = await (await fetch(new URL("planner.json", import.meta.url))).json()
const GPUS = tables.hardware
const MODELS = Object.fromEntries(Object.entries(tables.models).filter(([, shape]) => !shape.experts))

// ---- FLOPs and bytes

const widths = s => [s.heads * (s.head_dim || s.hidden / s.heads), (s.head_dim || s.hidden / s.heads) * s.kv_heads]
const products = s => {
  const [attention, kv] = widths(s)
  return s.layers * (s.hidden * (2 * attention + 2 * kv) + 3 * s.hidden * s.ffn) + s.hidden * s.vocabulary
}
const cacheBytes = s => 4 * s.layers * widths(s)[1]
const scores = (s, queries, keys) => 4 * s.layers * widths(s)[0] * queries * keys

export const points = (s, b, c, m, n) => {
  const d = widths(s)[0] / s.heads, moved = 2 * products(s) + b * c * cacheBytes(s)
  return {
    "vector add": [m * n, 6 * m * n],
    "softmax": [5 * m * n, 4 * m * n],
    "matmul": [2 * m * n * n, 2 * (m * n + n * n + m * n)],
    "plain attention": [4 * s.heads * c * c * d, 2 * s.heads * (4 * c * c + 6 * c * d)],
    "fused attention": [4 * s.heads * c * c * d, 2 * s.heads * (4 * c * d)],
    "decode": [b * (2 * products(s) + scores(s, 1, c)), moved],
    "prefill": [b * (2 * products(s) * c + scores(s, c, c) / 2), moved],
  }
}
const least = ([flops, moved], gpu) => Math.max(flops / gpu.flops, moved / gpu.bandwidth)
const ceilingOf = (s, c) => (2 * products(s) + scores(s, 1, c)) / (c * cacheBytes(s))

// ---- what is said

const inFlops = x => {
  const [unit, size] = [["T", 1e12], ["G", 1e9]].find(u => x >= u[1]) ?? ["M", 1e6]
  return `${digits(x / size)} ${unit}FLOP`
}

export const facts = (gpu, model, point, b, c, m, n) => {
  const device = GPUS[gpu], s = MODELS[model], at = points(s, b, c, m, n), others = {}
  for (const [name, [flops, moved]] of Object.entries(at)) {
    const seconds = least([flops, moved], device)
    others[name] = [digits(flops / moved), `${digits(flops / seconds / 1e12)} TFLOP/s`, inSeconds(seconds)]
  }
  const [flops, moved] = at[point]
  const held = 2 * (products(s) + (s.tied ? 0 : s.hidden * s.vocabulary)) + b * c * cacheBytes(s)
  const tooMuch = held > device.memory_gib * 2 ** 30
  return {
    "ridge": digits(device.flops / device.bandwidth),
    "flops": inFlops(flops), "bytes": inBytes(moved), "intensity": others[point][0],
    "bound": flops / device.flops > moved / device.bandwidth ? "compute" : "memory",
    "least": others[point][2], "rate": others[point][1],
    "share": `${digits(100 * (flops / least(at[point], device) / device.flops))}%`,
    "tokens": digits(b / least(at.decode, device)), "ceiling": digits(ceilingOf(s, c)),
    "held": `${inBytes(held)} of ${device.memory_gib} GiB${tooMuch ? ", too much" : ""}`,
    others,
  }
}

// ---- the page

const powers = (from, to) => [...Array(to - from + 1).keys()].map(k => 2 ** (from + k))
export const controls = [
  { name: "gpu", label: "GPU", options: () => Object.keys(GPUS), first: "h100", main: true },
  { name: "model", label: "model", options: () => Object.keys(MODELS), first: "llama-3-8b" },
  { name: "point", label: "operation", options: () => Object.keys(points(MODELS["llama-3-8b"], 1, 1, 1, 1)), first: "decode", main: true },
  { name: "batch", label: "sequences in the batch, b", first: 1, slider: true, main: true,
    options: () => [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 1024] },
  { name: "context", label: "tokens in each sequence, c", options: () => powers(5, 17), first: 2048, slider: true },
  { name: "tokens", label: "rows of the matrix product", options: () => powers(0, 14), first: 64, slider: true },
  { name: "width", label: "width of the matrix product", options: () => powers(8, 14), first: 8192, slider: true },
]
const presets = [
  { name: "one user of Llama 3 8B", values: {} },
  { name: "256 users at once", values: { batch: 256 } },
  { name: "a large matrix product", values: { point: "matmul", tokens: 8192 } },
]
const SIZE = { "decode": "batch", "prefill": "context", "plain attention": "context", "fused attention": "context",
  "matmul": "tokens", "vector add": "tokens", "softmax": "tokens" }
const caseOf = state => [state.gpu, state.model, state.point, state.batch, state.context, state.tokens, state.width]
const pointsOf = state => points(MODELS[state.model], state.batch, state.context, state.tokens, state.width)

const LEFT = 46, LOW = 0.1, HIGH = 1e5
const across = width => value => LEFT + Math.log(value / LOW) / Math.log(HIGH / LOW) * (width - LEFT - 8)

const draw = (svg, width, state, said) => {
  const { flops: peak, bandwidth } = GPUS[state.gpu], height = 330, foot = height - 34, ridge = peak / bandwidth
  const x = across(width), bottom = LOW * bandwidth
  const y = rate => foot - Math.log(rate / bottom) / Math.log(2 * peak / bottom) * (foot - 6)
  const out = [], put = (at, up, kind, words) => out.push(`<text x="${at.toFixed(1)}" y="${up.toFixed(1)}" class="${kind}">${words}</text>`)
  for (let value = LOW; value < 1.01 * HIGH; value *= 10) {
    out.push(`<path d="M${x(value).toFixed(1)} ${foot}V6" class="line"/>`)
    if (value < HIGH / 2) put(x(value), foot + 15, "soft", Number(value.toPrecision(1)).toLocaleString("en"))
  }
  for (let rate = 10 ** Math.ceil(Math.log10(bottom)); rate < 2 * peak; rate *= 10) {
    out.push(`<path d="M${LEFT} ${y(rate).toFixed(1)}H${width}" class="line"/>`)
    put(LEFT - 5, y(rate) + 4, "end soft", Number((rate / 1e12).toPrecision(1)).toLocaleString("en"))
  }
  put(width - 2, height - 4, "end soft", "FLOPs per byte")
  put(0, 12, "start soft", "TFLOP/s")
  const ceiling = ceilingOf(MODELS[state.model], state.context)
  out.push(`<path d="M${x(LOW)} ${foot}L${x(ridge).toFixed(1)} ${y(peak).toFixed(1)}H${width}" class="arc thick"/>`,
    `<path d="M${x(ridge).toFixed(1)} ${foot}V${y(peak).toFixed(1)}" class="arc dashed"/>`)
  put(x(ridge) + 4, foot - 6, "start soft", `ridge ${said.ridge}`)
  if (ceiling < HIGH && ceiling > LOW) {
    out.push(`<path d="M${x(ceiling).toFixed(1)} ${foot}V${y(Math.min(peak, ceiling * bandwidth)).toFixed(1)}" class="arc far dashed"/>`)
    const left = x(ceiling) > (ceiling < ridge ? LEFT + 130 : width - 130)
    put(x(ceiling) + (left ? -4 : 4), foot - 26, left ? "end soft" : "start soft", `decode at most ${said.ceiling}`)
  }
  // labels: on the slope to the right of their points, from the top down; under the flat roof in steps
  let above = -99, step = 0
  const sorted = Object.entries(pointsOf(state)).map(([name, [flops, moved]]) => [name, flops / moved]).sort((a, b) => b[1] - a[1])
  for (const [name, intensity] of sorted) {
    const at = x(Math.min(HIGH, Math.max(LOW, intensity))), up = y(Math.min(peak, Math.max(LOW, intensity) * bandwidth))
    const flat = intensity >= ridge, place = flat ? up + 20 + 15 * step++ : Math.max(up + 5, above + 14)
    above = Math.max(above, place)
    const end = flat && at > width - 100
    const from = flat ? at + (end ? -4 : 4) : at + 12
    if (flat) out.push(`<path d="M${at.toFixed(1)} ${up.toFixed(1)}V${(place - 2).toFixed(1)}" class="line"/>`)
    else if (place > up + 8) out.push(`<path d="M${at.toFixed(1)} ${up.toFixed(1)}L${(from - 2).toFixed(1)} ${(place - 4).toFixed(1)}" class="line"/>`)
    put(from, place, `${end ? "end" : "start"} ${name === state.point ? "chosen" : "soft"}`, name)
    out.push(`<circle cx="${at.toFixed(1)}" cy="${up.toFixed(1)}" r="${name === state.point ? 6 : 4}" class="op-B"/>`,
      `<circle cx="${at.toFixed(1)}" cy="${up.toFixed(1)}" r="14" class="grip" data-drag="${name}" data-tip="${name}: ${said.others[name][0]} FLOPs per byte, at most ${said.others[name][1]}"/>`)
  }
  fill(svg, width, height, out.join(""))
}

export const start = place => {
  const { svg, list, compare, output } = picture("All of them, at most, under this roof", ["operation", "FLOP/byte", "TFLOP/s", "time"])
  const show = (state, tell) => {
    const said = facts(...caseOf(state)), { gpu, model, point, batch } = state
    draw(svg, widthOf(place), state, said)
    tell(`${point}: ${said.intensity} FLOPs per byte under a ridge of ${said.ridge}, so bound by ${said.bound}: ${said.least} at least. With ${batch} in a step ${model} writes ${said.tokens} tokens/s at most; ${said.held}.`)
    svg.setAttribute("aria-label", `The roof of ${gpu}: a slope to ${said.ridge} FLOPs per byte, then level. On it: ${
      Object.entries(said.others).map(([name, [intensity]]) => `${name} at ${intensity}`).join(", ")}.`)
    list([["FLOPs, bytes", `${said.flops}, ${said.bytes}`], ["intensity", `${said.intensity} FLOP/byte`], ["ridge", `${said.ridge} FLOP/byte`],
      ["bound by", said.bound], ["time, at least", said.least], ["reaches, at most", `${said.rate}, ${said.share} of the peak`],
      ["decode, at most", `${said.tokens} tokens/s`], ["decode's ceiling", `${said.ceiling} FLOP/byte`], ["weights and caches", said.held]])
    compare(Object.fromEntries(Object.entries(said.others).map(([name, [intensity, rate, time]]) =>
      [name, [intensity, rate.replace(" TFLOP/s", ""), time]])), point)
    return ["python roofs.py", `--gpu ${gpu}`, `--model ${model}`, `--point "${point}"`, `--batch ${batch}`,
      `--context ${state.context}`, `--tokens ${state.tokens}`, `--width ${state.width}`].join(" ")
  }
  const { state, change } = instrument(place, { controls, presets, show, output, demo: { name: "batch", beat: 500 } })
  draggable(svg, (name, at) => {
    const size = SIZE[name], along = across(widthOf(place))
    const { options } = controls.find(each => each.name === size)
    const off = value => {
      const [flops, moved] = pointsOf({ ...state, [size]: value })[name]
      return Math.abs(along(flops / moved) - at)
    }
    const nearest = options(state).reduce((best, value) => off(value) < off(best) ? value : best)
    change({ point: name, [size]: off(nearest) < off(state[size]) ? nearest : state[size] })
  })
}

for (const place of document.querySelectorAll("#roofline.instrument")) start(place)
