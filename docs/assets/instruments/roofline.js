// "Roofline": the points of snippets/planner/roofs.py under the roof of a GPU, with sizes to drag.
// tests/test_browser_instruments.py compares their results.
import { digits, element, fill, inBytes, inSeconds, instrument, picture, still, widthOf } from "./base.js"
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
const weightBytes = s => 2 * (products(s) + (s.tied ? 0 : s.hidden * s.vocabulary))
const fitting = (s, c, gpu) => Math.max(0, Math.floor((gpu.memory_gib * 2 ** 30 - weightBytes(s)) / (c * cacheBytes(s))))
// The smallest batch for which arithmetic limits decode, or false if memory limits decode at any batch size.
const crossing = (s, c, gpu) => {
  const gain = (2 * products(s) + scores(s, 1, c)) / (gpu.flops / gpu.bandwidth) - c * cacheBytes(s)
  return gain > 0 && Math.floor(2 * products(s) / gain) + 1
}
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
  const held = weightBytes(s) + b * c * cacheBytes(s)
  const tooMuch = held > device.memory_gib * 2 ** 30
  return {
    "ridge": digits(device.flops / device.bandwidth),
    "flops": inFlops(flops), "bytes": inBytes(moved), "intensity": others[point][0],
    "bound": flops / device.flops > moved / device.bandwidth ? "compute" : "memory",
    "least": others[point][2], "rate": others[point][1],
    "share": `${digits(100 * (flops / least(at[point], device) / device.flops))}%`,
    "tokens": digits(b / least(at.decode, device)), "ceiling": digits(ceilingOf(s, c)),
    "crossing": crossing(s, c, device) ? `${crossing(s, c, device)} or more sequences` : "no batch size",
    "held": `${inBytes(held)} of ${device.memory_gib} GiB${tooMuch ? ", too much" : ""}`,
    "fits": `${fitting(s, c, device)} sequences`,
    others,
  }
}

// ---- the page

const gpuName = name => name.toUpperCase().replace(/^RTX/, "RTX ").replace(/-(\d+)/, " with $1 GB")
const modelName = name => name.replaceAll("-", " ").replace(/\b[a-z]|\db\b/g, letters => letters.toUpperCase())
const powers = (from, to) => [...Array(to - from + 1).keys()].map(k => 2 ** (from + k))
export const controls = [
  { name: "gpu", label: "GPU", options: () => Object.keys(GPUS), first: "h100", main: true, text: gpuName },
  { name: "model", label: "model", options: () => Object.keys(MODELS), first: "llama-3-8b", text: modelName },
  { name: "point", label: "operation", options: () => Object.keys(points(MODELS["llama-3-8b"], 1, 1, 1, 1)), first: "decode", main: true },
  { name: "batch", label: "sequences in the batch, b", first: 1, slider: true, main: true,
    options: () => [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 1024] },
  { name: "context", label: "tokens in each sequence, c", options: () => powers(5, 17), first: 2048, slider: true, main: true },
  { name: "tokens", label: "rows of the matrix product, m", options: () => powers(0, 14), first: 64, slider: true },
  { name: "width", label: "columns of the matrix product, n", options: () => powers(8, 14), first: 8192, slider: true },
]
const presets = [
  { name: "one user of Llama 3 8B", values: {} },
  { name: "256 users at once", values: { batch: 256 } },
  { name: "448 users, 128 tokens each", values: { batch: 448, context: 128 } },
  { name: "a large matrix product", values: { point: "matmul", tokens: 8192 } },
]
const SIZE = { "decode": "batch", "prefill": "context", "plain attention": "context", "fused attention": "context",
  "matmul": "tokens" }
const caseOf = state => [state.gpu, state.model, state.point, state.batch, state.context, state.tokens, state.width]
const pointsOf = state => points(MODELS[state.model], state.batch, state.context, state.tokens, state.width)

const LEFT = 46, LOW = 0.1, HIGH = 1e5
const across = width => value => LEFT + Math.log(value / LOW) / Math.log(HIGH / LOW) * (width - LEFT - 8)

// While a player changes the batch size step by step, the state contains a size between two steps.
const draw = (svg, width, state, said) => {
  const { flops: peak, bandwidth } = GPUS[state.gpu], height = 340, foot = height - 34, ridge = peak / bandwidth
  const x = across(width), bottom = LOW * bandwidth
  const y = rate => foot - Math.log(rate / bottom) / Math.log(4 * peak / bottom) * (foot - 6)
  const out = [], put = (at, up, kind, words) => out.push(`<text x="${at.toFixed(1)}" y="${up.toFixed(1)}" class="${kind}">${words}</text>`)
  const place = intensity => {
    const inside = Math.min(HIGH, Math.max(LOW, intensity))
    return [x(inside), y(Math.min(peak, inside * bandwidth))]
  }
  const on = intensity => place(intensity).map(v => v.toFixed(1)).join(" ")
  const along = (from, to) => `M${on(from)}${from < ridge && ridge < to ? `L${on(ridge)}` : ""}L${on(to)}`
  const middle = x(ridge)
  out.push(`<path d="M${LEFT} 6H${middle.toFixed(1)}V${foot}H${LEFT}z" class="zone"/>`,
    `<path d="M${middle.toFixed(1)} 6H${width}V${foot}H${middle.toFixed(1)}z" class="zone fast"/>`)
  for (let value = LOW; value < 1.01 * HIGH; value *= 10) {
    out.push(`<path d="M${x(value).toFixed(1)} ${foot}V6" class="line"/>`)
    if (value < HIGH / 2) put(x(value), foot + 15, "soft", Number(value.toPrecision(1)).toLocaleString("en"))
  }
  for (let rate = 10 ** Math.ceil(Math.log10(bottom)); rate < 2 * peak; rate *= 10) {
    out.push(`<path d="M${LEFT} ${y(rate).toFixed(1)}H${width}" class="line"/>`)
    put(LEFT - 5, y(rate) + 4, "end soft", Number((rate / 1e12).toPrecision(1)).toLocaleString("en"))
  }
  put(width - 2, height - 4, "end soft", "FLOPs per byte")
  for (const [at, kind, words] of width < 500 ? [[4, "", "b = 1 to 1,024"], [128, " late", "memory full"]]
    : [[4, "", "decode and prefill, b = 1 to 1,024"], [250, " late", "more than the memory"]]) {
    out.push(`<path d="M${at} ${height - 8}h22" class="trail${kind}"/>`)
    put(at + 30, height - 4, "start soft", words)
  }
  put(0, 12, "start soft", "TFLOP/s")
  put((Math.max(LEFT, 60) + middle) / 2, 20, "", width < 500 ? "limited by memory" : "← limited by memory")
  put((middle + width) / 2, 20, "", width < 500 ? "by arithmetic" : "limited by arithmetic →")

  // the path of decode and of prefill from one sequence to very many, and the place where the memory is full
  const shape = MODELS[state.model], ceiling = ceilingOf(shape, state.context), fits = fitting(shape, state.context, GPUS[state.gpu])
  const intensityOf = (name, batch) => {
    const [flops, moved] = pointsOf({ ...state, batch })[name]
    return flops / moved
  }
  out.push(`<path d="${along(LOW, HIGH)}" class="arc thick"/>`, `<path d="M${middle.toFixed(1)} ${foot}V${y(peak).toFixed(1)}" class="arc dashed"/>`)
  const beyond = ceiling > ridge // a limit on the right of the ridge gets the space there
  put(middle + (beyond ? -4 : 4), foot - 6, beyond ? "end soft" : "start soft", `ridge ${said.ridge}`)
  for (const name of ["decode", "prefill"]) {
    const ends = [1, Math.min(1024, Math.max(1, fits)), 1024].map(batch => intensityOf(name, batch))
    if (fits) out.push(`<path d="${along(ends[0], ends[1])}" class="trail"/>`)
    out.push(`<path d="${along(ends[1], ends[2])}" class="trail late"/>`)
  }
  const labels = []
  for (const batch of [fits, 1, 8, 64, 512]) {
    if (batch < 1 || batch > 1024) continue
    const [at, up] = place(intensityOf("decode", batch)), full = batch === fits
    out.push(`<circle cx="${at.toFixed(1)}" cy="${up.toFixed(1)}" r="2.5" class="op-B"/>`)
    if (up < 60 || full && at < LEFT + 160 || labels.some(each => Math.abs(each - at) < 24)) continue // no space for a label
    put(at - 8, up - 8, "end soft halo", full ? `memory full at b = ${fits}` : `b = ${batch}`)
    labels.push(at)
  }
  if (ceiling < HIGH && ceiling > LOW) {
    const left = x(ceiling) > LEFT + 150 // above the roof, away from the labels of points
    out.push(`<path d="M${x(ceiling).toFixed(1)} ${foot}V26" class="arc far dashed"/>`)
    put(x(ceiling) + (left ? -4 : 4), 36, left ? "end soft" : "start soft", `limit of decode: ${said.ceiling}`)
  }
  // labels: on the slope to the right of their points, from the top down; under the flat roof in steps
  let above = -99, step = 0
  const texts = [] // above all lines
  const handles = []
  const sorted = Object.entries(pointsOf(state)).map(([name, [flops, moved]]) => [name, flops / moved]).sort((a, b) => b[1] - a[1])
  for (const [name, intensity] of sorted) {
    const [at, up] = place(intensity), chosen = name === state.point, moves = !name.match(/add|softmax/)
    const flat = intensity >= ridge, low = flat ? up + 24 + 15 * step++ : Math.max(up + 5, above + 14)
    above = Math.max(above, low)
    const end = flat && at > width - 100, from = flat ? at + (end ? -4 : 4) : at + 22
    const fits = words => end ? from - 7 * words.length > LEFT + 60 : from + 7 * words.length < (flat || low < foot - 44 ? width : middle)
    const whole = `${name}: ${said.rate}`, words = !chosen ? [name] : fits(whole) ? [whole] : [`${name}:`, said.rate]
    if (flat) out.push(`<path d="M${at.toFixed(1)} ${up.toFixed(1)}V${(low - 2).toFixed(1)}" class="thin"/>`)
    else if (low > up + 8) out.push(`<path d="M${at.toFixed(1)} ${up.toFixed(1)}L${(from - 2).toFixed(1)} ${(low - 4).toFixed(1)}" class="thin"/>`)
    words.forEach((line, i) => texts.push([from, low + 14 * i, `${end ? "end" : "start"} halo ${chosen ? "chosen" : "soft"}`, line]))
    if (words[1]) [step, above] = [step + 1, above + 14]
    const [cx, cy] = [at, up].map(v => v.toFixed(1)), what = said.others[name]
    handles.push(`<circle cx="${cx}" cy="${cy}" r="${moves ? chosen ? 8 : 6 : 4}" class="${moves ? "handle" : "bar"}"/>`)
    if (moves && chosen) handles.push(`<path d="M${(at - 12).toFixed(1)} ${(up - 5).toFixed(1)}l-6 5 6 5zM${(at + 12).toFixed(1)} ${(up - 5).toFixed(1)}l6 5-6 5z" class="op-B"/>`)
    handles.push(`<circle cx="${cx}" cy="${cy}" r="18" class="grip" data-tip="${name}: ${what[0]} FLOPs per byte, at most ${what[1]}, at least ${what[2]}"${moves ? ` data-drag="${name}"` : ""}/>`)
  }
  for (const each of texts) put(...each)
  // the selected point is on top
  fill(svg, width, height, out.join("") + handles.sort((a, b) => a.includes(`"${state.point}"`) - b.includes(`"${state.point}"`)).join(""))
}

export const start = place => {
  const { svg, list, compare, output } = picture("Upper limits of all operations", ["operation", "FLOPs per byte", "highest TFLOP/s", "shortest time"])
  const bar = element("div", { class: "instrument-foot" })
  let said
  const show = (state, tell) => {
    said = facts(...caseOf(state))
    const { gpu, model, point, batch } = state, sequences = `${batch} sequence${batch === 1 ? "" : "s"}`
    const size = { batch: sequences, context: `${state.context} tokens in each sequence`, tokens: `${state.tokens} rows` }[SIZE[point]]
    draw(svg, widthOf(place), state, said)
    const never = said.crossing === "no batch size", which = `${said.bound === "memory" ? "Memory" : "Arithmetic"} limits ${point}`
    const each = `${state.context} tokens in each sequence`, fast = `at most ${said.tokens} tokens/s`
    const needs = `Weights and caches need ${said.held}.`
    tell(point !== "decode" ? `${which}${size ? ` with ${size}` : ""}: it computes ${said.intensity} FLOPs per byte, and the ridge is ${said.ridge}. It needs at least ${said.least}, and computes at most ${said.rate}.`
      : never ? `Memory limits decode at any batch size: with ${each}, it computes at most ${said.ceiling} FLOPs per byte, and the ridge is ${said.ridge}. With ${sequences}, it computes ${said.intensity}, and generates ${fast}. ${needs}`
        : `${which} with ${sequences} and ${each}: it computes ${said.intensity} FLOPs per byte. The ridge is ${said.ridge}. Arithmetic limits decode with ${said.crossing}. At this batch size, decode generates ${fast}. ${needs}`)
    svg.setAttribute("aria-label", `The roof of ${gpuName(gpu)}: a slope to ${said.ridge} FLOPs per byte, then level. On it: ${
      Object.entries(said.others).map(([name, [intensity]]) => `${name} at ${intensity}`).join(", ")}.`)
    list([["FLOPs and bytes", `${said.flops}, ${said.bytes}`], ["arithmetic intensity", `${said.intensity} FLOP/byte`], ["ridge of the GPU", `${said.ridge} FLOP/byte`],
      ["limited by", said.bound], ["shortest possible time", said.least], ["highest possible speed", `${said.rate}, ${said.share} of the peak`],
      ["fastest decode", `${said.tokens} tokens/s`], ["limit of decode for any batch", `${said.ceiling} FLOP/byte`], ["arithmetic limits decode with", said.crossing], ["weights and caches", said.held],
      ["the memory is enough for", said.fits]])
    compare(Object.fromEntries(Object.entries(said.others).map(([name, [intensity, rate, time]]) =>
      [name, [intensity, rate.replace(" TFLOP/s", ""), time]])), point)
    return ["python roofs.py", `--gpu ${gpu}`, `--model ${model}`, `--point "${point}"`, `--batch ${batch}`,
      `--context ${state.context}`, `--tokens ${state.tokens}`, `--width ${state.width}`].join(" ")
  }
  const made = instrument(place, { controls, presets, show, output, bar, demo: { name: "batch" } }), { state, change } = made

  // The batch grows by itself.
  const sizes = controls.find(each => each.name === "batch").options(), most = sizes.at(-1)
  let timer = 0, loop = false
  const stop = () => {
    cancelAnimationFrame(timer)
    timer = 0
    playing.textContent = "Play"
  }
  const run = () => {
    const begin = performance.now(), from = state.batch < most ? state.batch : 1
    playing.textContent = "Stop"
    change({ batch: from, ...loop ? {} : { point: "decode" } })
    const frame = time => {
      const batch = Math.min(most, from * 2 ** (Math.max(0, time - begin) / 800))
      const reached = sizes.findLast(size => size <= batch)
      if (reached !== state.batch) change({ batch: reached })
      if (!still()) draw(svg, widthOf(place), { ...state, batch }, said)
      if (batch < most) timer = requestAnimationFrame(frame)
      else if (loop) timer = requestAnimationFrame(run)
      else stop()
    }
    timer = requestAnimationFrame(frame)
  }
  const playing = made.button("Play", () => {
    if (!timer) return run()
    stop()
    change()
  })
  bar.append(playing, element("p", {}, "Drag a point sideways, or let the batch grow."))
  place.addEventListener("input", stop)
  place.addEventListener("click", event => event.target !== playing && stop())
  made.play = () => {
    stop()
    loop = true
    run()
  }
  made.pause = stop

  draggable(svg, made, (name, at) => {
    stop()
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
