// The viewer of traces: the lines, the messages and the variables of N ranks, one tick after the other. It imports
// nothing, because `rank_trace.py --open` puts this one module into a page. docs/contributing/recording.md describes the
// format of a trace. A tick is a moment in logical time: in each tick, every rank that can continue makes one step.

const element = (tag, attributes = {}, ...inside) => {
  const made = document.createElement(tag)
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value)
  made.append(...inside)
  return made
}
const { abs, floor, max, min, round } = Math
const json = value => JSON.stringify(value)
const on = (target, event, act) => target.addEventListener(event, act)
const edges = target => target.getBoundingClientRect()
const upTo = n => [...Array(n).keys()]
const clamp = (low, x, high) => max(low, min(high, x))
const escaped = text => String(text).replace(/[&<>"]/g, each => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[each])
const joined = words => words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`
const named = ranks => ranks.length > 1 ? `Ranks ${joined(ranks)}` : `Rank ${ranks[0]}`
const grouped = number => String(number).replace(/\B(?=(\d{3})+$)/g, ",")

// ---- values and operations as text

const inBytes = x => {
  const [unit, size] = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]].find(each => x >= each[1]) ?? [x === 1 ? "byte" : "bytes", 1]
  return `${Number((x / size).toPrecision(3))}\u00a0${unit}`
}
const exactly = x => x < 1024 ? inBytes(x) : `${inBytes(x)} (${grouped(x)} bytes)`
const shapeOf = shape => shape.length === 1 ? `${grouped(shape[0])} element${shape[0] === 1 ? "" : "s"}` : shape.map(grouped).join("×") || "scalar"
const isObject = value => value === Object(value)
const isTensor = value => isObject(value) && "t" in value
const itemsOf = value => value?.l ?? value?.u ?? []
const python = { null: "None", true: "True", false: "False" }
const plain = x => python[x] ?? (x && abs(x) < 1e-4 ? x.toExponential() : String(x)) // as Python, an exponent instead of many zeros

// A stored value as text, as in the program.
export const show = value => {
  if (!isObject(value)) return typeof value === "string" ? `"${value}"` : plain(value)
  if (isTensor(value)) return `${value.t} ${shapeOf(value.s)}: ${summary(value)}`
  const more = value.n > 8 ? ["…"] : [], all = items => [...items.map(show), ...more].join(", ")
  if ("l" in value) return `[${all(value.l)}]`
  if ("u" in value) return `(${all(value.u)}${value.u.length === 1 ? "," : ""})`
  if ("e" in value) return `{${all(value.e)}}`
  if ("d" in value && value.d.some(([, item]) => isObject(item))) return `dict with the keys ${[...value.d.map(([key]) => show(key)), ...more].join(", ")}`
  if ("d" in value) return `{${[...value.d.map(([key, item]) => `${show(key)}: ${show(item)}`), ...more].join(", ")}}`
  return value.o
}

// The contents of a tensor as a short text.
const summary = value => {
  if ("state" in value) return value.state
  if ("c" in value) return `mean ${plain(value.c[0])}`
  const width = value.s.at(-1)
  const rows = value.s.length < 2 || !width ? [value.v] : upTo(value.v.length / width).map(i => value.v.slice(i * width, (i + 1) * width))
  const text = rows.map(row => row.map(plain).join(", ")).join("; ")
  return value.s.length ? `[${text}]` : text
}

const isSend = operation => operation.name.endsWith("send")
const kindOf = operation => isSend(operation) ? "sends" : operation.name.endsWith("recv") ? "receives" : "joins"

// Which part of a larger tensor a message carries: "part 2", if all parts have the same size, else its elements.
const partOf = payload => {
  if (!payload?.part) return ""
  const [first, whole] = payload.part, size = payload.s.reduce((a, b) => a * b, 1)
  if (size >= whole) return ""
  return first % size || whole % size ? `from element ${grouped(first)}` : `part ${first / size} of ${whole / size}`
}
const payloadText = payload => {
  if (!payload) return ""
  const many = payload.n ? `${payload.n} tensors, the first ` : ""
  return [partOf(payload), `${many}${payload.t} ${shapeOf(payload.s)}`, exactly(payload.b)].filter(Boolean).join(" · ")
}
const contentOf = payload => payload?.value ? summary(payload.value) : ""

// ---- what the ranks do at each tick

// Adds a step to the functions that a rank is in, and returns the function of this step.
const follow = (stack, [, , kind, line, what, frame]) => {
  const place = stack.findIndex(each => each.frame === frame)
  if (place >= 0) stack.length = place + 1
  else {
    if (stack.at(-1)?.returned || stack.at(-1)?.what === what) stack.pop()
    stack.push({ frame, what, variables: {} })
  }
  return Object.assign(stack.at(-1), { line, returned: kind === "return" })
}

// The trace with all data that the picture needs: the segments of each rank, the ends of each operation, messages and collectives.
export const model = trace => {
  const { steps, operations, ranks } = trace
  const last = steps.at(-1)[0]
  const rows = upTo(ranks).map(() => []), file = upTo(ranks).map(() => 0)
  const ends = operations.map(() => ({})) // the ticks in which each operation starts and ends, with their lines
  const entered = {}, lastOf = {} // the ticks in which each line begins, and the last tick of each frame
  const stacks = rows.map(() => []), callers = {} // the lines that call the function of each line
  for (const step of steps) {
    const [tick, rank, kind, line, what, frame] = step, traced = typeof what === "number", stack = stacks[rank]
    if (traced) {
      file[rank] = trace.functions[what][1]
      lastOf[`${rank}:${frame}`] = tick
      follow(stack, step)
    } else if (stack.at(-1)?.returned && stack.at(-1).line !== line) stack.pop()
    const key = `${file[rank]}:${line}`
    if (kind === "line") (entered[key] ??= []).push(tick)
    // If an operation is at a different line than the last recorded line of its rank, it is in a function that is
    // not recorded line by line. This last recorded line is then the line of the call.
    const top = stack.at(-1), inside = top?.line === line, caller = (inside ? stack.at(-2) : top)?.line
    const all = callers[key] ??= new Set()
    if (caller) all.add(caller)
    rows[rank].push({ tick, kind, line, caller, callers: all, name: inside && trace.functions[top.what][0], file: file[rank], operations: traced ? [] : what })
    const which = { call: "start", start: "start", done: "end", waited: "end" }[kind]
    if (which) for (const each of what) ends[each][which] ??= { tick, line, file: file[rank] }
  }
  const segments = rows.map((row, rank) => row.map((step, i) => {
    const next = row[i + 1]
    const how = step.kind === "wait" ? "waits" : step.kind === "call" ? kindOf(operations[step.operations[0]]) : "computes"
    const never = !next && how !== "computes" && Boolean(trace.ends[rank].in)
    return { ...step, caller: step.callers.size > 1 && step.caller, how, never, to: next ? next.tick : never ? last + 1 : step.tick + 1 }
  }))
  const endOf = (operation, which) => ({ rank: operations[operation].rank, ...ends[operation][which] ?? { tick: which === "start" ? 0 : last + 1 } })
  const messages = trace.messages.map(([send, receive]) =>
    ({ send: endOf(send, "start"), receive: endOf(receive, "end"), posted: endOf(receive, "start").line, payload: operations[send].payload ?? operations[receive].payload }))
  const matched = new Set(trace.messages.flat())
  operations.forEach((operation, i) => { // sends that no rank receives, and receives without a send
    if (operation.peer === undefined || matched.has(i) || !ends[i].start || operation.end !== "never") return
    const here = endOf(i, "start"), there = { rank: operation.peer, tick: last + 1 }
    messages.push({ lost: isSend(operation) ? "send" : "receive", payload: operation.payload,
      ...isSend(operation) ? { send: here, receive: there } : { send: { rank: operation.peer, tick: here.tick }, receive: { ...there, rank: operation.rank, line: here.line } } })
  })
  for (const each of messages) Object.assign(each, { from: each.send.tick, to: each.receive.tick })
  const collectives = trace.collectives.map(({ parts, missing = [], mismatch }) => {
    const from = min(...parts.map(each => ends[each].start?.tick ?? 0))
    const to = max(...parts.map(each => ends[each].end?.tick ?? last + 1))
    return { parts, missing, mismatch, from, to, names: [...new Set(parts.map(each => operations[each].name))] }
  })
  const flights = upTo(ranks).map(rank => operations.flatMap((operation, i) => operation.rank === rank && operation.async && ends[i].start
    ? [{ from: ends[i].start.tick, to: endOf(i, "end").tick, how: kindOf(operation) }] : []))
  return { trace, ranks, last, segments, ends, messages, collectives, flights: flights.map(inRows), entered, lastOf }
}

// Gives each interval the first free row.
const inRows = intervals => {
  const until = []
  return intervals.map(each => {
    const free = until.findIndex(end => end <= each.from), row = free < 0 ? until.length : free
    until[row] = each.to
    return { ...each, row }
  })
}

// Where each rank is at a tick: its line, the kind of its last step, what it does, and the functions that it is in with their variables.
export const stateAt = ({ trace, ranks, segments, lastOf }, tick) => {
  const found = upTo(ranks).map(rank => {
    const row = segments[rank], now = row.findLast(each => each.tick <= tick)
    if (!now) return { how: "before", operations: [], stack: [] }
    const over = now === row.at(-1) && tick >= now.to
    return { ...now, how: over ? "ended" : now.how, final: now === row.at(-1), moved: now.tick === tick, stack: [] }
  })
  for (const step of trace.steps) {
    const [at, rank, , , , , changes] = step
    if (at > tick) break
    if (!changes) continue
    const { variables } = follow(found[rank].stack, step)
    const { "-": gone = [], ...fresh } = changes
    Object.assign(variables, fresh)
    for (const name of gone) delete variables[name]
  }
  found.forEach((state, rank) => { // a trace does not say when a call returns: a frame is shown if it has a later step
    state.stack = state.stack.filter(({ frame }, i, all) => i === all.length - 1 || lastOf[`${rank}:${frame}`] > tick || trace.ends[rank].how !== "finished")
  })
  return found
}

const plural = text => text.replace(/^(run|wait|end|exit)s\b/, "$1").replace(/^(is|has|was)\b/, word => ({ is: "are", has: "have", was: "were" })[word])

// How a rank has ended, in words.
const fate = ({ how, status }) => ({ finished: "has finished", exit: `exited with status ${status}`, raised: `ended with ${status}`, error: `received ${status}`,
  waiting: "was still waiting", killed: "was killed", terminated: "was ended by SIGTERM", aborted: "was aborted", running: "was still running" })[how]
const isDead = ({ how }) => /killed|terminated|raised|exit/.test(how)

// What a rank does, in words.
const doing = ({ trace }, state, rank) => {
  const names = [...new Set(state.operations.map(each => trace.operations[each].name))].join(" and "), end = trace.ends[rank]
  if (state.how === "before") return "has not begun"
  if (state.how === "ended") return fate(end)
  if (state.how === "computes") { // the last line of a rank that does not reach the end of the program
    return state.final && isDead(end) ? fate(end).replace("was", "is").replace("ed with", "s with") : "runs"
  }
  if (state.how === "waits") return `waits for ${names}`
  return state.never ? `waits in ${names}` : `is inside ${names}`
}

// How the recording ends, in sentences: first the ranks that have ended, then the ranks that wait.
const ending = ({ trace }) => {
  const groups = Object.groupBy(upTo(trace.ranks).filter(rank => trace.ends[rank].how !== "finished"), rank => {
    const end = trace.ends[rank], { how, status, line, in: calls = [] } = end
    const inside = calls.length ? ` in ${joined(calls)}` : ""
    const until = how === "error" && status ? ` until the call raises ${status}` : how === "aborted" ? " until the process aborts" : ""
    return `${isDead(end) ? fate(end) : `waits${inside}`}${line ? ` at line ${line}` : ""}${until}`
  })
  const sentences = Object.entries(groups).sort(([a], [b]) => a.startsWith("waits") - b.startsWith("waits"))
    .map(([text, ranks]) => `${named(ranks)} ${ranks.length > 1 ? plural(text) : text}.`)
  return [...trace.hangs.length ? ["From here on, no rank makes progress."] : [], ...sentences].join(" ")
}

// ---- the source

const WORDS = "and|as|assert|async|await|break|class|continue|def|del|elif|else|except|finally|for|from|global|if|import|in|is|lambda|None|nonlocal|not|or|pass|raise|return|try|True|False|while|with|yield"
const TOKEN = new RegExp(`("""|''')[^]*?\\1|#[^\\n]*|"(?:\\\\.|[^"\\\\\\n])*"|'(?:\\\\.|[^'\\\\\\n])*'|\\b(?:${WORDS})\\b|\\b\\d[\\w.]*`, "g")

// The lines of a program as HTML.
const coloured = source => {
  let html = "", at = 0
  for (const found of source.matchAll(TOKEN)) {
    const [word] = found, kind = word[0] === "#" ? "comment" : /^["']/.test(word) ? "string" : /^\d/.test(word) ? "number" : "keyword"
    html += escaped(source.slice(at, found.index))
    html += word.split("\n").map(part => `<span class="${kind}">${escaped(part)}</span>`).join("\n")
    at = found.index + word.length
  }
  return (html + escaped(source.slice(at))).split("\n")
}

// ---- the picture

// The patterns of the bars of a rank. They differ without colour, too. A bar that sends is solid.
const patterns = (id, style) => [
  ["receives", "M-1-1 7 7M5-1 7 1M-1 5 1 7"],
  ["joins", 'M0 3H6M3 0V6" stroke-width="1'],
  ["waits"],
].map(([how, path]) => `<pattern id="${id}${how}" ${style} width="6" height="6" patternUnits="userSpaceOnUse"><rect class="back" width="6" height="6"/>${path ? `<path class="hatch" d="${path}"/>` : '<circle class="dots" cx="3" cy="3" r="1"/>'}</pattern>`).join("")

const rect = (kind, x, y, width, height, more = "") => `<rect class="${kind}" x="${+x.toFixed(1)}" y="${+y.toFixed(1)}" width="${+width.toFixed(1)}" height="${height}" ${more}/>`
const words = (kind, x, y, text) => `<text class="${kind}" x="${x}" y="${y}">${escaped(text)}</text>`
const bar = (id, how, x, y, width, height, never = "") =>
  rect(how + never, x, y, max(1, width), height, `rx="2"${how === "computes" ? "" : ` fill="url(#${id}${how})"`}`)

// Shows a trace in `place`. `sources` has the text of each file.
export const view = (place, trace, sources) => {
  const made = model(trace), { ranks, last, segments, messages, collectives, flights, entered } = made
  let tick = clamp(1, round(new URL(location).searchParams.get("tick")) || 1, last)
  let chosen, from = 1, timer
  const style = rank => `style="--h:${round(235 + (360 * rank) / ranks) % 360}"`

  // ---- the elements

  const button = (words, press, more = {}) => {
    const one = element("button", more, words)
    on(one, "click", press)
    return one
  }
  const output = element("output")
  const play = button("Play", () => timer ? stop() : start(), { class: "tv-play" })
  const speed = element("select")
  speed.innerHTML = "<option value=1200>slow<option value=600 selected>normal<option value=200>fast"
  const moments = { message: messages, collective: collectives }
  const nextOf = kind => moments[kind].map(each => each.from).filter(each => each > tick).sort((a, b) => a - b)[0]
  const jump = kind => nextOf(kind) && go(nextOf(kind))
  const jumpKinds = Object.keys(moments).filter(kind => moments[kind].length)
  const jumps = jumpKinds.map(kind => button(`Next ${kind}`, () => jump(kind)))
  const back = button("Step back", () => go(tick - 1)), forward = button("Step", () => go(tick + 1))
  const hang = trace.hangs.length ? [button(trace.ends.every(({ how }) => /error|waiting/.test(how)) ? "Show the hang" : "Show the end", () => go(last))] : []
  const [overview, lanes, compact] = ["All ticks of the recording", "The ranks over time", ""].map(label => {
    const holder = element("div")
    holder.innerHTML = `<svg role="img" aria-label="${label}"/>`
    return holder.firstChild
  })
  const draw = (picture, width, height, html) => {
    picture.setAttribute("viewBox", `0 0 ${width} ${height}`)
    picture.setAttribute("height", height)
    picture.innerHTML = html
  }
  const controls = element("div", { class: "tv-bar", role: "group", "aria-label": "Move through the recording" },
    play, back, forward, ...jumps, ...hang, element("label", {}, "Speed ", speed), output, element("div", { class: "tv-compact", "aria-hidden": true }, compact))
  const slider = element("input", { type: "range", min: 1, max: last, "aria-label": "Tick", autocomplete: "off" })
  let before
  on(slider, "input", () => go(Number(slider.value)))
  on(slider, "pointerdown", () => { before = tick })
  on(slider, "pointercancel", () => go(before)) // the touch scrolls the page
  const folded = (title, text, open) => { // a text with a button that hides it
    const fold = button(title, () => fold.setAttribute("aria-expanded", !(text.hidden = !text.hidden)), { class: "tv-fold", "aria-expanded": open })
    text.hidden = !open
    return element("div", {}, fold, text)
  }
  const legend = element("p", { class: "tv-legend" })
  const source = element("div", { class: "tv-source", role: "group", "aria-label": "Source" })
  const away = element("div", { class: "tv-away" })
  const end = element("p", { class: "tv-end" })
  const now = element("div", { class: "tv-now" })
  const table = element("div", { class: "tv-variables", tabindex: 0, role: "region", "aria-label": "Variables of each rank" })
  const status = element("p", { "aria-live": "polite", class: "tv-status" })
  const main = element("div", { class: "tv-main" }, element("div", { class: "tv-lanes" }, lanes, folded("What the marks mean", legend, matchMedia("(min-width: 60em)").matches)), end, now, element("div", { class: "tv-code" }, source, away), table)
  const hints = ["A tap on a line of the source moves to its next execution, and a tap on a bar moves to its tick.",
    "A tap on an arrow or on a frame marks its ends in the source. The marks disappear when you move to a different tick.",
    `Keys: ← and → move by one tick${jumpKinds.map(kind => `, “${kind[0]}” moves to the next ${kind}`).join("")}. After a click on the picture, Home and End move to the first and the last tick, and the space bar plays.`]
  const box = element("div", { class: "tv", tabindex: -1 }, controls,
    element("div", { class: "tv-over" }, overview, slider), main,
    folded("Taps and keys", element("p", { class: "tv-help" }, hints.join(" ")), !matchMedia("(pointer: coarse)").matches))

  // ---- the source: long parts that were not recorded are folded

  const texts = sources.map(text => text.split("\n")), defined = {} // the name of the function of each recorded line
  const lineElements = {}, touched = new Set(segments.flat().map(each => `${each.file}:${each.line}`))
  sources.forEach((text, file) => {
    if (sources.length > 1) source.append(element("div", { class: "tv-file" }, trace.files[file]))
    const all = coloured(text.replace(/\n$/, "").replace(/^ *# --8<-- .*$/gm, ""))
    const heads = new Set()
    const used = all.map((_, i) => touched.has(`${file}:${i + 1}`))
    const indents = texts[file].map(line => line.search(/\S|$/))
    used.forEach((is, i) => { // the head of each function with a recorded line
      if (!is) return
      const head = texts[file].findLastIndex((line, k) => k < i && indents[k] < indents[i] && /^\s*(async )?def /.test(line))
      if (head < 0) return
      heads.add(head)
      defined[`${file}:${i + 1}`] = texts[file][head].match(/def (\w+)/)[1]
    })
    const near = used.map((_, i) => heads.has(i) || used.slice(max(0, i - 3), i + 4).some(Boolean))
    let i = 0
    while (i < all.length) {
      let until = i
      while (until < all.length && near[until] === near[i]) until++
      const lines = all.slice(i, until).map((html, k) => {
        const number = i + k + 1, key = `${file}:${number}`, indent = indents[number - 1]
        const content = element("span", { style: `--d:${indent}` })
        content.innerHTML = html.replace(/^(<span[^>]*>)? +/, "$1") || " "
        const line = element("div", { class: "tv-line", "data-line": number, style: `--n:${ranks}` }, element("b"), element("i", {}, number), content)
        if (entered[key]) {
          line.dataset.run = entered[key].length
          line.setAttribute("role", "button")
          line.tabIndex = -1
          on(line, "click", () => { if (!getSelection().toString()) go(entered[key].find(each => each > tick) ?? entered[key][0]) })
        }
        lineElements[key] = line
        return line
      })
      if (!near[i] && lines.length > 6) {
        const fold = button(`Show ${lines.length} more lines (${i + 1} to ${until})`, () => fold.replaceWith(...lines), { class: "tv-fold" })
        source.append(fold)
      } else source.append(...lines)
      i = until
    }
  })
  const runnable = () => [...source.querySelectorAll("[data-run]")]
  on(source, "keydown", event => {
    const all = runnable(), at = all.indexOf(document.activeElement)
    const to = { ArrowDown: at + 1, ArrowUp: at - 1 }[event.key]
    if (at < 0) return
    if (to !== undefined) all[clamp(0, to, all.length - 1)].focus()
    else if (event.key === "Enter") all[at].click()
    else return
    event.preventDefault()
    event.stopPropagation()
  })

  // the ranks whose lines are above or below the visible part of the source
  let marked = new Map(), shown = []
  const chips = here => here.map(rank => chip(rank, shown[rank])).join("")
  const paintAway = () => {
    const { scrollTop, clientHeight } = source
    away.replaceChildren(...[...marked].flatMap(([line, here]) => {
      const arrow = line.offsetTop < scrollTop ? "↑" : line.offsetTop + 19 > scrollTop + clientHeight ? "↓" : ""
      const one = button("", () => { source.scrollTop = line.offsetTop - clientHeight / 2 }, { tabindex: -1 })
      one.innerHTML = `${arrow} ${chips(here)} line ${line.dataset.line}`
      return arrow ? [one] : []
    }))
  }
  on(source, "scroll", paintAway)

  const lineOf = ({ file, line }) => lineElements[`${file}:${line}`]
  const paintSource = states => {
    shown = states
    marked = Map.groupBy(upTo(ranks).filter(rank => lineOf(states[rank])), rank => lineOf(states[rank]))
    for (const line of source.querySelectorAll(".now,[data-end],[tabindex='0']")) {
      line.classList.remove("now")
      delete line.dataset.end
      if (line.dataset.run) line.tabIndex = -1
      if (!marked.has(line)) line.firstChild.replaceChildren()
    }
    for (const [line, here] of marked) {
      line.classList.add("now")
      line.firstChild.innerHTML = chips(here)
    }
    const ends = chosenEnds()
    for (const { line, file = 0 } of ends) {
      const found = lineOf({ file, line })
      if (!found) continue
      found.dataset.end = ""
      found.lastChild.dataset.note = joined([...new Set(ends.filter(each => each.line === line).map(each => each.word))])
    }
    const current = [...marked.keys()].filter(each => each.isConnected)
    const target = current.find(each => each.dataset.run)
    if (target) target.tabIndex = 0
    const places = (current.length ? current : [...source.querySelectorAll("[data-end]")]).map(each => [each.offsetTop, each.offsetTop + each.offsetHeight])
    if (!places.length || !source.clientHeight) return
    const low = min(...places.map(each => each[0])), high = max(...places.map(each => each[1]))
    const { scrollTop, clientHeight } = source
    if (low < scrollTop + 24 || high > scrollTop + clientHeight - 24) {
      const moved = states.find(each => each.moved && each.line)
      const anchor = moved && lineOf(moved)
      const middle = high - low < clientHeight - 48 || !anchor ? (low + high) / 2 : anchor.offsetTop
      source.scrollTop = middle - clientHeight / 2
    }
    paintAway()
  }
  // The line that calls the function of a rank. It is empty if the recording has only one such line, or if the
  // text of the line contains neither the name of the function nor that of its class.
  const calledFrom = ({ caller, name, file, line }, words) => {
    const names = String(name || defined[`${file}:${line}`]).match(/\w+/g)
    return caller && names.some(each => texts[file][caller - 1].includes(each)) ? `${words} line ${caller}` : ""
  }
  const called = segments.flat().some(each => calledFrom(each, ""))
  const chip = (rank, state) => {
    const kind = state.how === "ended" ? " ended" : /computes|before/.test(state.how) ? "" : " waits"
    return `<span class="tv-chip${kind}" ${style(rank)} title="rank ${rank} ${doing(made, state, rank)}">${rank}</span>`
  }

  // ---- messages and collectives

  // The ends of the chosen message or collective, with the words that the source and the list show for them.
  const chosenEnds = () => {
    if (!chosen) return []
    if (chosen.parts) {
      return chosen.parts.map(each => {
        const { rank, name, line, payload } = trace.operations[each], { start, end: stop } = made.ends[each], contents = contentOf(payload)
        return { rank, line, file: start?.file, tick: start?.tick, word: name, text: `Rank ${rank} enters ${name} at line ${line}${contents ? ` with ${contents}` : ""}${stop ? "" : ", and this call does not return"}.` }
      })
    }
    const { send, receive, posted, lost } = chosen, at = (each, does) => `Rank ${each.rank} ${does} at line ${each.line}.`
    const sent = { ...send, word: "send", text: at(send, "sends") }, got = { ...receive, word: "receive" }
    if (lost === "send") return [sent, { ...receive, text: `Rank ${receive.rank} never receives this message.` }]
    if (lost) return [{ ...got, text: `Rank ${receive.rank} waits at line ${receive.line} for a message that rank ${send.rank} never sends.` }]
    const before = posted && posted !== receive.line ? `starts to receive at line ${posted}, and ` : ""
    return [sent, { ...got, text: at(receive, `${before}has the message`) }]
  }
  const label = each => each.parts
    ? `${joined(each.names)}${each.missing.length ? ` without ${named(each.missing).toLowerCase()}` : ""}${each.mismatch ? `: different ${each.mismatch}` : ""}`
    : partOf(each.payload).split(" of ")[0] || (each.payload ? `${each.payload.t} ${shapeOf(each.payload.s)}` : "")
  const long = each => {
    if (!each.parts) {
      const value = contentOf(each.payload)
      const text = `rank ${each.send.rank} → rank ${each.receive.rank}: ${payloadText(each.payload)}${value ? ` · ${value}` : ""}`
      return each.lost ? `${text} · no rank ${each.lost === "send" ? "receives" : "sends"} it` : text
    }
    const { payload, reduce } = trace.operations[each.parts[0]]
    return `${label(each)}${reduce ? ` (${reduce})` : ""}${payload ? `: ${payloadText(payload)}` : ""}${each.missing.length || each.mismatch ? "" : `, ${each.parts.length} ranks`}`
  }
  const choose = each => {
    chosen = chosen === each ? null : each
    paint()
  }
  const activeAt = at => [...collectives, ...messages].filter(each => each.from <= at && at <= each.to)
  const most = last > 2000 ? 6 : max(...upTo(last).map(i => activeAt(i + 1).length))
  const space = 36 + 31 * clamp(1, most, 6)
  now.style.minHeight = `${space}px`
  const paintNow = states => {
    const active = activeAt(tick)
    const shown = chosen && !active.includes(chosen) ? [chosen, ...active] : active
    const groups = Object.groupBy(upTo(ranks), rank => {
      const state = states[rank]
      return `${doing(made, state, rank)}|${state.line ?? ""}${calledFrom(state, ", called from")}`
    })
    const sentence = Object.entries(groups).map(([key, here]) => {
      const [what, line] = key.split("|"), place = line && `${what === "runs" ? "" : " at"} line ${line}`
      return `${named(here)} ${here.length > 1 ? plural(what) : what}${place}.`
    }).join(" ")
    status.textContent = `Tick ${tick} of ${last}. ${sentence}`
    const items = shown.slice(0, 6).map(each => element("li", {}, button(long(each), () => choose(each), { "aria-pressed": each === chosen })))
    const rest = shown.length > 6 ? [element("li", {}, `and ${shown.length - 6} more`)] : []
    now.replaceChildren(element("p", {}, sentence), element("ul", { class: "tv-list" }, ...items, ...rest))
    if (!shown.length && (messages.length || collectives.length)) now.append(element("p", {}, `No ${messages.length ? "message is on its way" : "collective is running"}.`))
    const ends = chosenEnds()
    if (ends.length) {
      now.append(element("div", { class: "tv-both" }, ...ends.map(each => {
        const text = element("span")
        text.innerHTML = chip(each.rank, { how: "computes", operations: [] })
        const go_ = each.tick > 0 && each.tick <= last && each.line ? [button(`Go to tick ${each.tick}`, () => go(each.tick, true))] : []
        return element("div", {}, text, each.text, ...go_)
      })))
    }
    end.textContent = tick === last ? ending(made) : ""
  }

  // ---- the lanes

  const id = `tv${Math.random().toString(36).slice(2, 7)}-`
  const flightRows = min(4, max(0, ...flights.flat().map(each => each.row + 1)))
  const boxes = inRows(collectives.map(each => ({ ...each, to: max(each.to, each.from + 1), all: each })))
  const boxRows = min(6, max(0, ...boxes.map(each => each.row + 1)))
  let plan, full
  const lay = () => {
    const width = max(280, lanes.parentElement.clientWidth)
    const left = width < 480 ? 78 : 122, least = width < 480 ? 20 : 22
    const whole = last + (trace.hangs.length && 5) // with space for what never arrives
    const count = min(whole, max(4, floor((width - left) / least)))
    const cell = min(96, (width - left) / count), thick = 22
    const top = 16 + boxRows * 17, gap = messages.some(each => each.lost) ? 38 : messages.length ? 30 : 14
    const pitch = max((width < 480 ? 60 : 36) + (called ? 14 : 0), thick + flightRows * 6 + gap)
    plan = { width, left, count, cell, whole, top, pitch, thick, height: top + ranks * pitch - (gap > 14 && !called ? 10 : 0) }
    full = plan
    main.style.setProperty("--least", `${plan.height + space + 350}px`)
  }
  const x = at => plan.left + (at - from) * plan.cell
  const y = rank => plan.top + 4 + rank * plan.pitch

  const endOfBar = ({ to }) => min(plan.width, x(to > last ? plan.whole + 1 : to)) // what never ends continues to the edge
  const arrow = (each, active) => {
    const { cell, thick, pitch, left, width } = plan
    const a = [x(each.from) + cell / 2, y(each.send.rank) + thick / 2], b = [x(each.to) + cell / 2, y(each.receive.rank) + thick / 2]
    if (max(a[0], b[0]) < left || min(a[0], b[0]) > width) return ""
    const down = b[1] < a[1] ? -1 : 1, off = active || each === chosen ? "" : " off"
    const begin = [a[0], a[1] + down * thick / 2], stop = [b[0], b[1] - down * thick / 2]
    const unreceived = each.lost === "send", upward = unreceived && down < 0 && a[0] > left + 90 // its text is on the left, and the text of a different rank on the right
    if (each.lost) { // it never arrives
      const reach = down * (pitch - thick) * (down > 0 ? 0.7 : 0.75)
      if (unreceived) stop[1] = begin[1] + reach
      else begin[1] = stop[1] - reach
      stop[0] = min(width - 90, begin[0] + 1.2 * cell)
      if (upward) stop[0] = begin[0] - 6
    }
    const [dx, dy] = [stop[0] - begin[0], stop[1] - begin[1]], length = Math.hypot(dx, dy) || 1
    const [ux, uy] = [dx / length, dy / length], path = `M${begin}L${stop}`
    const tip = [[0, 0], [-8, 3.5], [-8, -3.5]].map(([p, q]) => [stop[0] + p * ux - q * uy, stop[1] + p * uy + q * ux]).join(" ")
    const cut = each.lost ? words(upward ? "red end" : "red", stop[0] + (upward ? -2 : 2), stop[1] + 4, unreceived ? `✕ for rank ${each.receive.rank}` : `✕ from rank ${each.send.rank}`) : `<polygon class="head${off}" points="${tip}"/>`
    const at = clamp(0, (x(tick) + cell / 2 - begin[0]) / (dx || 1), 1)
    const dot = active && !each.lost ? `<circle class="head" r="4.5" cx="${begin[0] + at * dx}" cy="${begin[1] + at * dy}"/>` : ""
    return { begin, stop, active, each, html: `<g ${style(each.send.rank)}><path class="arrow${off}${each.lost ? " lost" : ""}${each === chosen ? " chosen" : ""}" d="${path}"/>${cut}${dot}`
      + `<path class="grab" data-message="${messages.indexOf(each)}" d="${path}"><title>${escaped(long(each))}</title></path></g>` }
  }
  const placed = []
  const across = ({ begin: [x0, y0], stop: [x1, y1] }, at) => { // where an arrow crosses a height, and half of the width that it needs there
    const slope = (x1 - x0) / (y1 - y0)
    return [x0 + (at - y0) * slope, abs(8 * slope) + 4]
  }
  const pill = (own, _, arrows) => { // the label of an arrow, where no other label is, and beside the arrows
    const { begin, stop, each } = own
    const text = [plan.width > 480 || partOf(each.payload) ? label(each) : "", each.payload && inBytes(each.payload.b)].filter(Boolean).join(" · "), width = text.length * 5.9 + 10
    const hops = max(1, abs(each.send.rank - each.receive.rank))
    const covered = ([cx, cy]) => arrows.filter(other => {
      const [middle, half] = across(other, cy)
      return (cy - other.begin[1]) * (cy - other.stop[1]) < 0 && abs(middle - cx) < width / 2 + half
    }).length
    const [best] = upTo(hops).flatMap(i => [0, 1, -1].map(side => {
      const cy = begin[1] + (i + 0.5) / hops * (stop[1] - begin[1]), [middle, half] = across(own, cy)
      return [clamp(plan.left + width / 2, middle + side * (width / 2 + half), plan.width - width / 2 - 2), cy, width]
    })).filter(([cx, cy]) => placed.every(other => abs(other[0] - cx) > (other[2] + width) / 2 + 2 || abs(other[1] - cy) > 18))
      .sort((a, b) => covered(a) - covered(b))
    if (!best) return ""
    placed.push(best)
    const [cx, cy] = best
    return `<g ${style(each.send.rank)}>${rect("pill", cx - width / 2, cy - 8, width, 16, 'rx="8"')}${words("mid", cx, cy + 4, text)}</g>`
  }

  // Draws the ranks over time. The compact picture has only the bars.
  const paintLanes = (picture, states) => {
    const small = picture === compact
    plan = small ? { ...full, top: 12, pitch: 33, height: 14 + ranks * 33 } : full
    const { width, left, count, cell, whole, pitch, thick, height } = plan
    if (tick < from + 2 || tick > from + count - 4) from = clamp(1, tick - round(count * (tick < from + 2 ? 0.6 : 0.3)), max(1, whole - count + 1))
    const visible = each => each.to >= from && (each.tick ?? each.from) <= from + count
    const parts = [], names = [rect("back", 0, 14, left - 3, height - 14)]
    const right = x(min(from + count, last + 1))
    for (let at = from; at < from + count && at <= last; at++) {
      if (at === tick || (at % 5 === 0 && abs(at - tick) > 1)) parts.push(words(`${at === tick ? "b" : "soft"} mid`, x(at) + cell / 2, 11, at))
    }
    const labels = []
    for (const { all: each, row, from: begin, to } of small ? [] : boxes) {
      if (to < from || begin > from + count) continue
      const bad = each.missing.length || each.mismatch ? " bad" : ""
      const here = each.parts.map(part => trace.operations[part].rank).sort((a, b) => a - b)
      const x0 = max(left - 4, x(begin) + 1.5), x1 = min(width - 1, endOfBar({ to }) - 1.5), y0 = 16 + min(row, boxRows - 1) * 17
      const adjacent = here.at(-1) - here[0] === here.length - 1
      const above = rank => y(rank) - 5, below = rank => y(rank) + thick + flightRows * 6 + 3
      const spans = adjacent ? [[here[0] === 0 ? y0 : above(here[0]), below(here.at(-1))]] : here.map(rank => [above(rank), below(rank)])
      const name = label(each), text = [`${name} · ${payloadText(trace.operations[each.parts[0]].payload)}`, name, name.replace(/.* (?=without)/, "")].find((each, i) => i > 1 || each.length * 6.4 < x1 - x0)
      for (const [a, b] of spans) parts.push(rect(`box${bad}${each === chosen ? " chosen" : ""}`, x0, a, max(3, x1 - x0), b - a, `data-collective="${collectives.indexOf(each)}" rx="4"`).replace("/>", `><title>${escaped(long(each))}</title></rect>`))
      const size = text.length * 6.4, start = max(left, min(x0 + 4, width - size))
      labels.push([begin <= tick && tick <= to, bad, text, start, y0 + 13, start + size, size > x1 - x0])
    }
    // A label that would cover a different one is left out. The labels of this moment come first.
    const shown = []
    for (const [, bad, text, start, at, end, back] of labels.sort((a, b) => b[0] - a[0])) {
      if (shown.some(([a, b, line]) => line === at && end > a && b > start)) continue
      shown.push([start, end, at])
      if (back) parts.push(rect("back", start - 2, at - 10, end - start, 12))
      parts.push(words(bad ? "red" : "b", start, at, text))
    }
    upTo(ranks).forEach(rank => {
      parts.push(`<g ${style(rank)}>`, rect("track", left, y(rank), right - left, thick))
      for (const each of segments[rank].filter(visible)) {
        const x0 = max(left, x(each.tick)), x1 = each.never ? endOfBar(each) : min(width, x(each.to))
        if (x1 <= x0) continue
        parts.push(bar(`${id}${rank}`, each.how, x0 + 0.5, y(rank), x1 - x0 - 1, thick, each.never ? " never" : ""))
        if (each.how === "computes" && x1 - x0 > 16) parts.push(words(`mid${each.kind === "line" ? "" : " soft"}${each.line > 99 && cell < 26 ? " tiny" : ""}`, (x0 + x1) / 2, y(rank) + 15, each.line))
        else if (each.how !== "computes" && x1 - x0 > 44) {
          const text = each.never ? "does not return" : each.how === "joins" ? "" : each.how, middle = (x0 + x1) / 2, half = text.length * 3.1 + 3
          if (text && half * 2 < x1 - x0) parts.push(rect("back", middle - half, y(rank) + 4, half * 2, 14, 'rx="2"'), words(each.never ? "mid red" : "mid", middle, y(rank) + 15, text))
        }
      }
      const gone = segments[rank].at(-1), { how } = trace.ends[rank]
      if (gone && !gone.never && gone.to <= from + count && /killed|aborted|terminated|raised|error/.test(how)) {
        parts.push(words("red", x(gone.to) + 3, y(rank) + 15, `✕ ${how}`))
      }
      for (const each of small ? [] : flights[rank].filter(visible)) {
        const x0 = max(left, x(each.from) + cell / 2), x1 = min(width, x(each.to) + cell / 2)
        if (x1 > x0) parts.push(bar(`${id}${rank}`, each.how, x0, y(rank) + thick + 1 + min(each.row, 3) * 6, x1 - x0, 5))
      }
      parts.push("</g>")
      const state = states[rank], text = doing(made, state, rank), from_ = calledFrom(state, "from")
      names.push(`<foreignObject x="0" y="${y(rank) - 3}" width="${left - 6}" height="${pitch}"><div class="tv-name">`
        + `${chip(rank, state)} <b>${state.line ? `line ${state.line}` : ""}</b><br>${from_}${small ? "" : `${from_ && "<br>"}${escaped(text)}`}</div></foreignObject>`)
    })
    placed.length = 0
    const arrows = (small ? [] : messages).map(each => arrow(each, each.from <= tick && tick <= each.to)).filter(Boolean)
    parts.push(rect("column", x(tick), 14, cell, height - 16))
    parts.push(...arrows.map(each => each.html), ...arrows.filter(({ active, each }) => !each.lost && (active || each === chosen)).sort((a, b) => (b.each === chosen) - (a.each === chosen)).map(pill), ...names)
    draw(picture, width, height, `<defs>${small ? "" : upTo(ranks).map(rank => patterns(`${id}${rank}`, style(rank))).join("")}</defs>${parts.join("")}`)
    plan = full
  }

  let scale
  const paintOverview = () => {
    const width = max(280, box.clientWidth)
    scale = width / last
    const high = 9, height = ranks * high + 6, at = value => (value - 1) * scale
    const parts = segments.flatMap((row, rank) => row.filter(each => each.how === "computes")
      .map(each => rect("run", at(each.tick), 4 + rank * high, (min(each.to, last + 1) - each.tick) * scale, high - 2, style(rank))))
    for (const each of messages) {
      if (!each.lost) parts.push(`<line ${style(each.send.rank)} stroke="var(--e)" x1="${at(each.from + 0.5)}" y1="${3 + (each.send.rank + 0.5) * high}" x2="${at(each.to + 0.5)}" y2="${3 + (each.receive.rank + 0.5) * high}"/>`)
    }
    for (const each of collectives) {
      parts.push(rect("all", at(each.from), 2, max(2, (min(each.to, last + 1) - each.from) * scale), height - 4))
    }
    draw(overview, width, height, `${rect("track", 0, 0, width, height)}${parts.join("")}<g></g>`)
  }
  const paintWindow = () => {
    const height = ranks * 9 + 6, at = (tick - 0.5) * scale
    overview.lastChild.innerHTML = (plan.count < last ? rect("window", (from - 1) * scale + 1, 1, plan.count * scale - 2, height - 2) : "")
      + `<line class="cursor" x1="${at}" x2="${at}" y2="${height}"/>`
  }

  // ---- the variables

  const functionName = number => trace.functions[number][0]?.replace(/^.*<locals>\./, "") ?? "the program"
  const order = [] // each function's variables in the order of their first change
  const firsts = {}, finals = {}, atStart = {} // the first and the last value of each variable, and the variables that exist before a function's first line
  for (const [, rank, , , what, frame, changes] of trace.steps) {
    if (!changes) continue
    let known = order.find(each => each.what === what)
    if (!known) order.push(known = { what, names: [] })
    atStart[`${rank}:${frame}`] ??= [what, Object.keys(changes)]
    for (const [name, value] of Object.entries(changes)) {
      if (name !== "-" && !known.names.includes(name)) known.names.push(name)
      firsts[`${rank}:${frame}:${name}`] ??= value
      finals[`${rank}:${frame}:${name}`] = value
    }
  }
  const owners = trace.functions.map(() => ({})) // the enclosing function of each variable that a nested function does not define itself
  for (const [what, names] of Object.values(atStart)) {
    const [full, file] = trace.functions[what], outer = order.find(each => full?.startsWith(`${trace.functions[each.what][0]}.<locals>.`))
    const parameters = outer && sources[file]?.match(new RegExp(`def ${functionName(what)}\\(([^]*?)\\)( ->|:)`))
    if (parameters) for (const name of names) if (outer.names.includes(name) && !parameters[1].match(new RegExp(`\\b${name}\\b`))) owners[what][name] = outer.what
  }
  const holder = ({ stack }, what, name) => stack.findLast(each => name in each.variables && (owners[each.what][name] ?? each.what) === what)
  const unbroken = text => escaped(text).replace(/\S+/g, "<i>$&</i>") // no line break inside a number
  const tensorCell = (value, changed) => {
    const contents = "state" in value ? `<span class="tv-state">${escaped(value.state)}</span>` : `<span class="${changed ? "changed" : ""}">${unbroken(summary(value))}</span>`
    return `${contents}<small>${value.t} ${shapeOf(value.s)}</small>`
  }
  const strip = (value, before, same, done) => {
    const items = itemsOf(value), old = itemsOf(before)
    if (!items.length || !items.every(isTensor)) return null
    const cells = items.map((item, i) => {
      const text = "c" in item ? plain(item.c[0]) : "state" in item ? item.state : summary(item)
      const kind = [json(item) !== json(old[i]) && "changed", "state" in item && "tv-state"].filter(Boolean).join(" ")
      return `<span class="${kind}" data-i="${i}" title="${escaped(show(item))}">${same(i) ? "= " : ""}${done(i, item) ? "✓ " : ""}${escaped(text)}</span>`
    }).join("")
    return `<div class="tv-strip">${cells}${value.n > 8 ? "…" : ""}</div><small>${items.length} × ${items[0].t} ${shapeOf(items[0].s)}</small>`
  }
  const paintVariables = (states, before) => {
    const rowsOf = ({ what, names }) => {
      const rows = names.filter(name => !(name in owners[what]) && states.some(state => holder(state, what, name))).map(name => {
        const frames = states.map(state => holder(state, what, name)), values = frames.map(frame => frame?.variables[name])
        const old = frames.map((frame, rank) => {
          const was = frame && holder(before[rank], what, name)
          return was && (was.frame === frame.frame || was.what !== what || frame.what !== what) ? was.variables[name] : undefined
        })
        const texts = values.map(value => json(value))
        const same = i => {
          const all = values.map(value => json(itemsOf(value)[i]))
          return ranks > 1 && all.every(each => each && each === all[0]) && !all[0].includes('"state"')
        }
        const equal = ranks > 1 && values.every(isTensor) && !("state" in values[0]) && texts.every(text => text === texts[0])
        const cells = values.map((value, rank) => {
          if (value === undefined) return "<td></td>"
          const changed = texts[rank] !== json(old[rank])
          const key = `${rank}:${frames[rank].frame}:${name}`, [begin, final] = [firsts, finals].map(each => itemsOf(each[key]))
          const done = (i, item) => { // the part has changed, and it has its last value
            const text = json(item)
            return !("state" in item) && text === json(final[i]) && text !== json(begin[i])
          }
          const inside = isTensor(value) ? tensorCell(value, changed) : strip(value, old[rank], same, done)
          return `<td>${inside || `<span class="mono${changed ? " changed" : ""}">${unbroken(show(value))}</span>`}</td>`
        })
        return `<tr><th scope="row" class="mono">${escaped(name)}${equal ? '<span class="tv-equal">= equal</span>' : ""}</th>${cells.join("")}</tr>`
      })
      return rows.length ? `<tr class="function"><th colspan="${ranks + 1}" scope="rowgroup">in ${escaped(functionName(what))}</th></tr>${rows.join("")}` : ""
    }
    const head = states.map((state, rank) => `<th scope="col">${chip(rank, state)} rank ${rank}</th>`).join("")
    const { scrollTop, scrollLeft } = table
    const body = order.map(rowsOf).join("")
    const note = ["Values before the marked line runs. Underlined: changed in this tick.", ...body.includes(">= ") || body.includes("tv-equal") ? ["=: equal on all ranks."] : [], ...body.includes("✓ ") ? ["✓: final value."] : []].join(" ")
    table.innerHTML = `<table><caption>${note}</caption><thead><tr><th scope="col">variable</th>${head}</tr></thead><tbody>${body}</tbody></table>`
    Object.assign(table, { scrollTop, scrollLeft })
  }

  // ---- moving

  const paint = () => {
    const states = stateAt(made, tick), before = stateAt(made, tick - 1)
    output.textContent = `Tick ${tick} of ${last}`
    slider.value = tick
    slider.ariaValueText = `tick ${tick} of ${last}`
    back.disabled = tick === 1
    forward.disabled = tick === last
    jumps.forEach((each, i) => { each.disabled = !nextOf(jumpKinds[i]) })
    paintLanes(lanes, states)
    if (past) paintLanes(compact, states)
    paintWindow()
    paintNow(states)
    paintVariables(states, before)
    paintSource(states)
    place.dataset.tick = tick
  }
  let address
  const move = (to, keep) => {
    to = clamp(1, to, last)
    if (to !== tick && !keep) chosen = null
    tick = to
    paint()
    clearTimeout(address)
    if (/^http/.test(location)) {
      address = setTimeout(() => {
        const url = new URL(location)
        url.searchParams.set("tick", tick)
        history.replaceState(history.state, "", url)
      }, 300)
    }
  }
  const stop = () => {
    clearTimeout(timer)
    timer = 0
    play.textContent = "Play"
    status.ariaLive = "polite"
  }
  const go = (to, keep) => {
    stop()
    move(to, keep)
  }
  const start = () => {
    if (tick === last) move(1)
    play.textContent = "Pause"
    status.ariaLive = "off"
    const next = () => {
      move(tick + 1)
      if (tick === last) stop()
      else timer = setTimeout(next, Number(speed.value))
    }
    timer = setTimeout(next, Number(speed.value))
  }
  let past = false // the reader has scrolled past the lanes
  on(window, "scroll", () => { // the compact picture replaces the lanes above the visible part
    const [top, bottom] = [lanes, main].map(each => edges(each).bottom - edges(controls).bottom - ranks * 33)
    if (past === (top < 0 && bottom > 60)) return
    past = controls.toggleAttribute("data-compact")
    paint()
  })
  on(document, "keydown", event => {
    const { target, key } = event, inside = box.contains(target), { top, bottom } = edges(main)
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || target === speed) return
    // outside of the viewer, only the keys that do not move the page work, and only while the viewer is in view
    if (!inside && (target.closest("input,select,textarea,[contenteditable],[tabindex]") || top > innerHeight - 80 || bottom < 80)) return
    const press = target.matches("button,[role=button]") && [" ", "Enter"].includes(key)
    const act = { ArrowRight: () => go(tick + 1), ArrowLeft: () => go(tick - 1), m: () => jump("message"), c: () => jump("collective"),
      ...inside && { Home: () => go(1), End: () => go(last), " ": () => timer ? stop() : start() } }[key]
    if (!act || press) return
    event.preventDefault()
    act()
  })
  on(document, "click", event => { // a link in the text to a tick
    const to = event.target.closest('a[href^="?tick="]')?.getAttribute("href").slice(6)
    if (!to) return
    event.preventDefault()
    go(Number(to))
    box.scrollIntoView()
  })
  const pointed = event => {
    const { left: edge, width } = edges(lanes)
    return from + floor(((event.clientX - edge) * (plan.width / width) - plan.left) / plan.cell)
  }
  // A tap acts when it ends, and a drag when it moves sideways. A vertical swipe only scrolls the page.
  let begin, dragged
  for (const one of [lanes, compact]) {
    on(one, "pointerdown", event => {
      begin = event
      dragged = false
    })
    on(one, "pointermove", event => {
      if (!event.buttons) return
      if (!dragged && abs(event.clientX - begin.clientX) < max(8, abs(event.clientY - begin.clientY))) return
      dragged = true
      one.setPointerCapture(event.pointerId)
      go(max(from, pointed(event)))
    })
    on(one, "click", event => {
      const { message, collective } = event.target.dataset
      if (dragged) return
      if (message ?? collective) return choose(message ? messages[message] : collectives[collective])
      if (pointed(event) >= from) go(pointed(event)) // a tap on the name of a rank does nothing
    })
  }

  const kinds = [["computes", "runs a line (its number)"], ["sends", "sends"], ["receives", "receives"], ["joins", "in a collective"], ["waits", "waits"]]
    .filter(([how]) => how === "computes" || [...segments, ...flights].flat().some(each => each.how === how))
  legend.innerHTML = kinds.map(([how, words]) => `<span><svg viewBox="0 0 24 13" aria-hidden="true" ${style(0)}>${bar(`${id}0`, how, 0.5, 0.5, 23, 12)}</svg>${words}</span>`).join("")
    + [flightRows && "thin bar: a transfer in the background", "grey number: the line continues after a call", collectives.length && "blue frame: a collective",
      trace.hangs.length && "red frame: a call that does not return", called && "from line: the line that calls the function", messages.some(each => each.lost) && "✕: a message that does not arrive"].filter(Boolean).map(words => `<span>${words}</span>`).join("")
    + [["", "the rank runs"], [" waits", "it is in a call"], [" ended", "it has ended"]].map(([kind, words]) => `<span><b class="tv-chip${kind}" ${style(0)}>0</b>${words}</span>`).join("")
  place.replaceChildren(box, status)
  let width
  const fit = () => {
    if ([0, width].includes(place.clientWidth)) return
    width = place.clientWidth
    lay()
    from = 1
    paintOverview()
    paint()
  }
  fit()
  new ResizeObserver(fit).observe(place)
  place.dataset.ready = ""
}

// Shows the trace that an element names, or the trace in the page itself.
export const start = async place => {
  const here = name => JSON.parse(document.getElementById(name).textContent)
  const { trace, sources } = place.dataset.trace ? await (await fetch(place.dataset.trace)).json()
    : { trace: here("trace-data"), sources: here("trace-sources") }
  view(place, trace, sources)
}

const place = document.getElementById("trace-viewer")
if (place) start(place)
