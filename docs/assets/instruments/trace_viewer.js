// The viewer of traces: the lines, the messages and the variables of N ranks, one tick after the other. It imports
// nothing, because `rank_trace.py --open` puts this one module into a page. docs/contributing/recording.md describes the
// format of a trace. A tick is a moment in logical time: in each tick, every rank that can continue makes one step.

const element = (tag, attributes = {}, ...inside) => {
  const made = document.createElement(tag)
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value)
  made.append(...inside)
  return made
}
const upTo = n => [...Array(n).keys()]
const clamp = (low, x, high) => Math.max(low, Math.min(high, x))
const escaped = text => String(text).replace(/[&<>"]/g, each => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[each])
const joined = words => words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`
const named = ranks => ranks.length > 1 ? `Ranks ${joined(ranks)}` : `Rank ${ranks[0]}`
const grouped = number => String(number).replace(/\B(?=(\d{3})+$)/g, ",")

// ---- values and operations as text

const inBytes = x => {
  const [unit, size] = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]].find(each => x >= each[1]) ?? [x === 1 ? "byte" : "bytes", 1]
  return `${Number((x / size).toPrecision(3))}\u00a0${unit}`
}
const shapeOf = shape => shape.map(grouped).join("×") || "scalar"
const isTensor = value => value !== null && typeof value === "object" && "t" in value
const isList = value => value !== null && typeof value === "object" && ("l" in value || "u" in value)
const python = { null: "None", true: "True", false: "False" }

// A stored value as text, as in the program.
export const show = value => {
  if (value === null || typeof value !== "object") return typeof value === "string" ? `"${value}"` : python[value] ?? String(value)
  if (isTensor(value)) return `${value.t} ${shapeOf(value.s)}: ${summary(value)}`
  const more = value.n > 8 ? ["…"] : [], all = items => [...items.map(show), ...more].join(", ")
  if ("l" in value) return `[${all(value.l)}]`
  if ("u" in value) return `(${all(value.u)}${value.u.length === 1 ? "," : ""})`
  if ("e" in value) return `{${all(value.e)}}`
  if ("d" in value && value.d.some(([, item]) => item && typeof item === "object")) return `dict with the keys ${[...value.d.map(([key]) => show(key)), ...more].join(", ")}`
  if ("d" in value) return `{${[...value.d.map(([key, item]) => `${show(key)}: ${show(item)}`), ...more].join(", ")}}`
  return value.o
}

// The contents of a tensor in a few letters.
const summary = value => {
  if ("state" in value) return value.state
  if ("c" in value) return `mean ${value.c[0]}`
  const width = value.s.at(-1)
  const rows = value.s.length < 2 || !width ? [value.v] : upTo(value.v.length / width).map(i => value.v.slice(i * width, (i + 1) * width))
  const text = rows.map(row => row.map(each => python[each] ?? each).join(", ")).join("; ")
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
  return [partOf(payload), `${many}${payload.t} ${shapeOf(payload.s)}`, inBytes(payload.b)].filter(Boolean).join(" · ")
}
const contentOf = payload => payload?.value ? summary(payload.value) : ""

// ---- what the ranks do at each tick

// The trace with everything that the picture needs: the segments of each rank, the ends of each operation, messages and collectives.
export const model = trace => {
  const { steps, operations, ranks } = trace
  const last = steps.at(-1)[0]
  const rows = upTo(ranks).map(() => []), file = upTo(ranks).map(() => 0)
  const ends = operations.map(() => ({})) // the ticks in which each operation starts and ends, with their lines
  const entered = {}, lastOf = {} // the ticks in which each line begins, and the last tick of each frame
  for (const [tick, rank, kind, line, what, frame] of steps) {
    if (kind === "line" || kind === "return") file[rank] = trace.functions[what][1]
    rows[rank].push({ tick, kind, line, file: file[rank], operations: typeof what === "number" ? [] : what })
    if (typeof what === "number") lastOf[`${rank}:${frame}`] = tick
    if (kind === "line") (entered[`${file[rank]}:${line}`] ??= []).push(tick)
    if (typeof what === "number") continue
    for (const each of what) {
      if (kind === "call" || kind === "start") ends[each].start ??= { tick, line, file: file[rank] }
      if (kind === "done" || kind === "waited") ends[each].end ??= { tick, line, file: file[rank] }
    }
  }
  const segments = rows.map((row, rank) => row.map((step, i) => {
    const next = row[i + 1]
    const how = step.kind === "wait" ? "waits" : step.kind === "call" ? kindOf(operations[step.operations[0]]) : "computes"
    const never = !next && how !== "computes" && Boolean(trace.ends[rank].in)
    return { ...step, how, never, to: next ? next.tick : never ? last + 1 : step.tick + 1 }
  }))
  const endOf = (operation, which) => {
    return { rank: operations[operation].rank, ...ends[operation][which] ?? { tick: which === "start" ? 0 : last + 1 } }
  }
  const messages = trace.messages.map(([send, receive]) =>
    ({ send: endOf(send, "start"), receive: endOf(receive, "end"), posted: endOf(receive, "start").line, payload: operations[send].payload ?? operations[receive].payload }))
  const matched = new Set(trace.messages.flat())
  operations.forEach((operation, i) => { // sends that no rank receives, and receives without a send
    if (operation.peer === undefined || matched.has(i) || !ends[i].start || operation.end !== "never") return
    const here = endOf(i, "start"), there = { rank: operation.peer, tick: last + 1 }
    messages.push({ lost: isSend(operation) ? "send" : "receive", payload: operation.payload,
      ...isSend(operation) ? { send: here, receive: there } : { send: { rank: operation.peer, tick: here.tick }, receive: { ...there, rank: operation.rank, line: here.line } } })
  })
  const collectives = trace.collectives.map(({ parts, missing = [], mismatch, group }) => {
    const from = Math.min(...parts.map(each => ends[each].start?.tick ?? 0))
    const to = Math.max(...parts.map(each => ends[each].end?.tick ?? last + 1))
    return { parts, missing, mismatch, group, from, to, names: [...new Set(parts.map(each => operations[each].name))] }
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
    return { ...now, how: over ? "ended" : now.how, moved: now.tick === tick, stack: [], returned: new Set() }
  })
  for (const [at, rank, kind, , what, frame, changes] of trace.steps) {
    if (at > tick) break
    if (kind !== "line" && kind !== "return") continue
    const state = found[rank], place = state.stack.findIndex(each => each.frame === frame)
    if (place >= 0) state.stack.length = place + 1
    else {
      const top = state.stack.at(-1)
      if (top && (state.returned.has(top.frame) || top.what === what)) state.stack.pop()
      state.stack.push({ frame, what, variables: {} })
    }
    const { "-": gone = [], ...fresh } = changes
    const { variables } = state.stack.at(-1)
    Object.assign(variables, fresh)
    for (const name of gone) delete variables[name]
    if (kind === "return") state.returned.add(frame)
  }
  found.forEach((state, rank) => { // a trace does not say when a call returns: a frame is shown if it has a later step
    state.stack = state.stack.filter(({ frame }, i, all) => i === all.length - 1 || lastOf[`${rank}:${frame}`] > tick || trace.ends[rank].how !== "finished")
  })
  return found
}

// For each rank, the line and the kind of its last step up to this tick; null before its first step.
export const positions = (trace, tick) => stateAt(model(trace), tick).map(({ line, kind }) => line ? [line, kind] : null)

const plural = text => text.replace(/^(run|wait)s\b/, "$1").replace(/^is\b/, "are").replace(/^has\b/, "have").replace(/^was\b/, "were")

// What a rank does, in words.
const doing = (made, state, rank) => {
  const names = [...new Set(state.operations.map(each => made.trace.operations[each].name))].join(" and ")
  if (state.how === "before") return "has not begun"
  if (state.how === "ended") {
    const { how, status } = made.trace.ends[rank]
    return { finished: "has finished", exit: `exited with status ${status}`, raised: `ended with ${status}`, error: `received ${status}`,
      waiting: "was still waiting", killed: "was killed", terminated: "was ended by SIGTERM", aborted: "was aborted", running: "was still running" }[how]
  }
  if (state.how === "computes") return "runs"
  if (state.how === "waits") return `waits for ${names}`
  return state.never ? `waits in ${names}` : `is inside ${names}`
}

// How the recording ends, in sentences.
const ending = ({ trace }) => {
  const groups = new Map()
  trace.ends.forEach(({ how, status, line, in: calls = [] }, rank) => {
    if (how === "finished") return
    const place = line ? ` at line ${line}` : "", inside = calls.length ? ` in ${joined(calls)}` : ""
    const later = how === "error" && status ? `the call raises ${status}` : how === "aborted" ? "the process aborts" : ""
    const text = { killed: `was killed${place}`, terminated: `was ended by SIGTERM${place}`, raised: `ended with ${status}`,
      exit: `exited with status ${status}` }[how] ?? `waits${inside}${place}`
    const key = `${text}|${later}`
    groups.set(key, [...groups.get(key) ?? [], rank])
  })
  const sentences = [...groups].flatMap(([key, ranks]) => {
    const [text, later] = key.split("|")
    return [`${named(ranks)} ${ranks.length > 1 ? plural(text) : text}.`, ...later ? [`Later, ${later}${ranks.length > 1 ? " on each of these ranks" : ""}.`] : []]
  })
  return [...trace.hangs.length ? ["The program hangs here: from now on, no rank makes progress."] : [], ...sentences].join(" ")
}

// ---- the source

const WORDS = "and as assert async await break class continue def del elif else except finally for from global if import in is lambda None nonlocal not or pass raise return try True False while with yield"
const TOKEN = new RegExp(`("""|''')[^]*?\\1|#[^\\n]*|"(?:\\\\.|[^"\\\\\\n])*"|'(?:\\\\.|[^'\\\\\\n])*'|\\b(?:${WORDS.replaceAll(" ", "|")})\\b|\\b\\d[\\w.]*`, "g")

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

const hue = (rank, ranks) => Math.round(235 + (360 * rank) / ranks) % 360
const hueOf = (rank, ranks) => `style="--h:${hue(rank, ranks)}"`

// The patterns of the bars of a rank. They differ without colour, too.
const patterns = (id, style) => `
<pattern id="${id}sends" ${style} width="6" height="6" patternUnits="userSpaceOnUse"><rect class="back" width="6" height="6"/><path class="hatch" d="M-1 7 7-1M-1 1 1-1M5 7 7 5"/></pattern>
<pattern id="${id}receives" ${style} width="6" height="6" patternUnits="userSpaceOnUse"><rect class="back" width="6" height="6"/><path class="hatch" d="M-1-1 7 7M5-1 7 1M-1 5 1 7"/></pattern>
<pattern id="${id}joins" ${style} width="6" height="6" patternUnits="userSpaceOnUse"><rect class="back" width="6" height="6"/><path class="hatch" d="M0 3H6M3 0V6" stroke-width="1"/></pattern>
<pattern id="${id}waits" ${style} width="6" height="6" patternUnits="userSpaceOnUse"><rect class="back" width="6" height="6"/><circle class="dots" cx="3" cy="3" r="1"/></pattern>`

const rect = (kind, x, y, width, height, more = "") => `<rect class="${kind}" x="${+x.toFixed(1)}" y="${+y.toFixed(1)}" width="${+width.toFixed(1)}" height="${height}" ${more}/>`
const words = (kind, x, y, text) => `<text class="${kind}" x="${x}" y="${y}">${escaped(text)}</text>`
const bar = (id, how, x, y, width, height, style, never = "") =>
  rect(how + never, x, y, Math.max(1, width), height, `${style} rx="2"${how === "computes" ? "" : ` fill="url(#${id}${how})"`}`)

// Shows a trace in `place`. `sources` has the text of each file.
export const view = (place, trace, sources) => {
  const made = model(trace), { ranks, last, segments, messages, collectives, flights, entered } = made
  const finale = ending(made)
  const first = new URLSearchParams(location.search).get("tick")
  let tick = clamp(1, Math.round(Number(first ?? place.dataset.tick ?? 1)) || 1, last)
  let chosen = null, from = 1, timer = 0, pointer = false
  const style = rank => hueOf(rank, ranks)

  // ---- the elements

  const button = (words, press, more = {}) => {
    const one = element("button", { type: "button", ...more }, words)
    one.addEventListener("click", press)
    return one
  }
  const output = element("output")
  const play = button("Play", () => timer ? stop() : start(), { class: "tv-play" })
  const speed = element("select", { "aria-label": "Speed" },
    ...[["slow", 1200], ["normal", 600], ["fast", 200]].map(([words, value]) => element("option", { value, ...words === "normal" && { selected: "" } }, words)))
  const moments = { message: messages.map(each => each.send.tick).filter(each => each > 0), collective: collectives.map(each => each.from).filter(each => each > 0) }
  const nextOf = kind => moments[kind].filter(each => each > tick).sort((a, b) => a - b)[0] ?? Math.min(...moments[kind])
  const jumps = Object.keys(moments).filter(kind => moments[kind].length)
    .map(kind => button(`Next ${kind}`, () => go(nextOf(kind)), { title: `Key: ${kind[0]}` }))
  const back = button("Step back", () => go(tick - 1)), forward = button("Step", () => go(tick + 1))
  const hang = trace.hangs.length ? [button("Show the hang", () => go(last))] : []
  const controls = element("div", { class: "tv-bar", role: "group", "aria-label": "Move through the recording" },
    play, back, forward, ...jumps, ...hang, element("label", {}, "Speed ", speed), output)
  const slider = element("input", { type: "range", min: 1, max: last, step: 1, "aria-label": "Tick", autocomplete: "off" })
  slider.addEventListener("input", () => go(Number(slider.value)))
  const namespace = "http://www.w3.org/2000/svg"
  const svgs = ["All ticks of the recording", "The ranks over time"].map(label => {
    const one = document.createElementNS(namespace, "svg")
    one.setAttribute("role", "img")
    one.setAttribute("aria-label", label)
    return one
  })
  const [overview, lanes] = svgs
  const legend = element("p", { class: "tv-legend" })
  const source = element("div", { class: "tv-source", role: "group", "aria-label": "Source" })
  const end = element("p", { class: "tv-end" })
  const now = element("div", { class: "tv-now" })
  const table = element("div", { class: "tv-variables", tabindex: 0, role: "region", "aria-label": "Variables of each rank" })
  const status = element("p", { "aria-live": "polite", class: "tv-status" })
  const main = element("div", { class: "tv-main" }, element("div", { class: "tv-lanes" }, lanes, legend), end, now, source, table)
  const box = element("div", { class: "tv" }, controls,
    element("div", { class: "tv-over" }, overview, slider), main,
    element("p", { class: "tv-help" }, "Keys: ← and → move by one tick, Home and End move to the first and to the last tick, the space bar plays. "
      + `${jumps.length ? `${joined(Object.keys(moments).filter(kind => moments[kind].length).map(kind => `“${kind[0]}” moves to the next ${kind}`))}. ` : ""}`
      + "A click on a line moves to its next execution. A click on an arrow or on a box shows all of its ends."))

  // ---- the source: long parts that were not recorded are folded

  const lineElements = {}, touched = new Set(segments.flat().map(each => `${each.file}:${each.line}`))
  sources.forEach((text, file) => {
    if (sources.length > 1) source.append(element("div", { class: "tv-file" }, trace.files[file]))
    const all = coloured(text.replace(/\n$/, "").replace(/^ *# --8<-- .*$/gm, ""))
    const heads = new Set()
    const used = all.map((_, i) => touched.has(`${file}:${i + 1}`))
    const lines_ = text.split("\n"), indents = lines_.map(line => line.search(/\S|$/))
    used.forEach((is, i) => { // the head of each function with a recorded line
      if (!is) return
      const head = lines_.findLastIndex((line, k) => k < i && indents[k] < indents[i] && /^\s*(async )?def /.test(line))
      if (head >= 0) heads.add(head)
    })
    const near = used.map((_, i) => heads.has(i) || used.slice(Math.max(0, i - 3), i + 4).some(Boolean))
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
          line.setAttribute("tabindex", -1)
          line.addEventListener("click", () => { if (!getSelection().toString()) go(entered[key].find(each => each > tick) ?? entered[key][0]) })
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
  source.addEventListener("keydown", event => {
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
  const away = ["top", "bottom"].map(edge => element("div", { class: "tv-away", style: `${edge}:0` }))
  source.prepend(away[0])
  source.append(away[1])
  let marked = new Map(), shown = []
  const paintAway = () => {
    const { scrollTop, clientHeight } = source
    const outside = [...marked].map(([line, here]) => [line, here, line.offsetTop < scrollTop ? 0 : line.offsetTop + 19 > scrollTop + clientHeight ? 1 : 2])
    away.forEach((edge, i) => edge.replaceChildren(...outside.filter(each => each[2] === i).map(([line, here]) => {
      const one = button("", () => { source.scrollTop = line.offsetTop - clientHeight / 2 }, { tabindex: -1 })
      one.innerHTML = `${"↑↓"[i]} ${here.map(rank => chip(rank, shown[rank])).join("")} line ${line.dataset.line}`
      return one
    })))
  }
  source.addEventListener("scroll", paintAway)

  const paintSource = states => {
    marked = new Map()
    shown = states
    states.forEach((state, rank) => {
      if (!state.line) return
      const line = lineElements[`${state.file}:${state.line}`]
      if (!line) return
      marked.set(line, [...marked.get(line) ?? [], rank])
    })
    for (const line of source.querySelectorAll(".now,[data-end],[tabindex='0']")) {
      line.classList.remove("now")
      delete line.dataset.end
      if (line.dataset.run) line.tabIndex = -1
      if (!marked.has(line)) line.firstChild.replaceChildren()
    }
    for (const [line, here] of marked) {
      line.classList.add("now")
      line.firstChild.innerHTML = upTo(ranks).map(rank => here.includes(rank) ? chip(rank, states[rank]) : "").join("")
    }
    const ends = chosenEnds()
    for (const { line, file = 0 } of ends) {
      const found = lineElements[`${file}:${line}`]
      if (!found) continue
      found.dataset.end = ""
      found.lastChild.dataset.note = joined([...new Set(ends.filter(each => each.line === line).map(each => each.word))])
    }
    const current = [...marked.keys()].filter(each => each.isConnected)
    const target = current.find(each => each.dataset.run)
    if (target) target.tabIndex = 0
    const places = (current.length ? current : [...source.querySelectorAll("[data-end]")]).map(each => [each.offsetTop, each.offsetTop + each.offsetHeight])
    if (!places.length || !source.clientHeight) return
    const low = Math.min(...places.map(each => each[0])), high = Math.max(...places.map(each => each[1]))
    const { scrollTop, clientHeight } = source
    if (low < scrollTop + 24 || high > scrollTop + clientHeight - 24) {
      const moved = states.find(each => each.moved && each.line)
      const anchor = moved && lineElements[`${moved.file}:${moved.line}`]
      const middle = high - low < clientHeight - 48 || !anchor ? (low + high) / 2 : anchor.offsetTop
      source.scrollTop = middle - clientHeight / 2
    }
    paintAway()
  }
  const chip = (rank, state) => {
    const kind = state.how === "ended" ? " ended" : ["computes", "before"].includes(state.how) ? "" : " waits"
    return `<span class="tv-chip${kind}" ${style(rank)} title="rank ${rank} ${doing(made, state, rank)}">${rank}</span>`
  }

  // ---- messages and collectives

  // The ends of the chosen message or collective, with the words that the source and the list show for them.
  const chosenEnds = () => {
    if (!chosen) return []
    if (chosen.parts) {
      return chosen.parts.map(each => {
        const { rank, name, line, payload } = trace.operations[each], { start, end: stop } = made.ends[each], contents = contentOf(payload)
        return { rank, line, file: start?.file, tick: start?.tick, word: name, text: `Rank ${rank} enters ${name} at line ${line}${contents ? ` with ${contents}` : ""}${stop ? "" : ", and it never returns"}.` }
      })
    }
    const { send, receive, posted, lost } = chosen, at = (each, does) => `Rank ${each.rank} ${does} at line ${each.line}.`
    const sent = { ...send, word: "send", text: at(send, "sends") }, got = { ...receive, word: "receive" }
    if (lost === "send") return [sent, { ...receive, text: `Rank ${receive.rank} never receives this message.` }]
    if (lost) return [{ ...got, text: at(receive, `waits for a message of rank ${send.rank}, which never sends it,`) }]
    const before = posted && posted !== receive.line ? `starts to receive at line ${posted}, and ` : ""
    return [sent, { ...got, text: at(receive, `${before}has the message`) }]
  }
  const label = each => each.parts
    ? `${joined(each.names)}${each.missing.length ? ` without ${named(each.missing).toLowerCase()}` : ""}${each.mismatch ? `: different ${each.mismatch}` : ""}`
    : `${partOf(each.payload).split(" of ")[0] || `${each.payload?.t ?? ""} ${each.payload ? shapeOf(each.payload.s) : ""}`}`
  const long = each => {
    if (!each.parts) {
      const value = contentOf(each.payload)
      const text = `rank ${each.send.rank} → rank ${each.receive.rank}: ${payloadText(each.payload)}${value ? ` · ${value}` : ""}`
      return each.lost ? `${text} · ${each.lost === "send" ? "no rank receives it" : "no rank sends it"}` : text
    }
    const { payload, reduce } = trace.operations[each.parts[0]]
    const size = each.missing.length || each.mismatch ? "" : `${each.parts.length} ranks`
    return `${label(each)}${reduce ? ` (${reduce})` : ""}: ${[payloadText(payload), size].filter(Boolean).join(", ")}`.replace(/: $/, "")
  }
  const choose = each => {
    chosen = chosen === each ? null : each
    paint()
  }
  const activeAt = at => [...collectives.filter(each => each.from <= at && at <= each.to), ...messages.filter(each => each.send.tick <= at && at <= each.receive.tick)]
  const most = last > 2000 ? 6 : Math.max(...upTo(last).map(i => activeAt(i + 1).length))
  const space = 36 + 31 * clamp(1, most, 6)
  now.style.minHeight = `${space}px`
  const paintNow = states => {
    const active = activeAt(tick)
    const shown = chosen && !active.includes(chosen) ? [chosen, ...active] : active
    const groups = new Map()
    states.forEach((state, rank) => {
      const key = `${doing(made, state, rank)}|${state.line ?? ""}`
      groups.set(key, [...groups.get(key) ?? [], rank])
    })
    const sentence = [...groups].map(([key, here]) => {
      const [what, line] = key.split("|"), place = line && (what === "runs" ? ` line ${line}` : ` at line ${line}`)
      return `${named(here)} ${here.length > 1 ? plural(what) : what}${place}.`
    }).join(" ")
    const said = element("p", {}, sentence)
    status.textContent = `Tick ${tick} of ${last}. ${sentence}`
    const items = shown.slice(0, 6).map(each => element("li", {}, button(long(each), () => choose(each), { "aria-pressed": each === chosen })))
    const rest = shown.length > 6 ? [element("li", {}, `and ${shown.length - 6} more`)] : []
    now.replaceChildren(said, element("ul", { class: "tv-list" }, ...items, ...rest))
    if (!shown.length && (messages.length || collectives.length)) now.append(element("p", {}, `No ${messages.length ? "message is on its way" : "collective is running"}.`))
    const ends = chosenEnds()
    if (ends.length) {
      now.append(element("div", { class: "tv-both" }, ...ends.map(each => {
        const text = element("span")
        text.innerHTML = chip(each.rank, { how: "computes", operations: [] })
        const go_ = each.tick > 0 && each.tick <= last && each.line ? [button(`Go to tick ${each.tick}`, () => go(each.tick))] : []
        return element("div", {}, text, each.text, ...go_)
      })))
    }
    end.textContent = tick === last ? finale : ""
  }

  // ---- the lanes

  const id = `tv${Math.random().toString(36).slice(2, 7)}-`
  const flightRows = Math.min(4, Math.max(0, ...flights.flat().map(each => each.row + 1)))
  const boxes = inRows(collectives.map(each => ({ ...each, to: Math.max(each.to, each.from + 1), all: each })))
  const boxRows = Math.min(6, Math.max(0, ...boxes.map(each => each.row + 1)))
  let geometry
  const lay = () => {
    const width = Math.max(280, lanes.parentElement.clientWidth)
    const left = width < 480 ? 78 : 122, least = width < 480 ? 20 : 22
    const whole = last + (trace.hangs.length && 2) // with space for what never arrives
    const count = Math.min(whole, Math.max(4, Math.floor((width - left) / least)))
    const cell = Math.min(96, (width - left) / count), thick = 22
    const top = 16 + boxRows * 17, gap = messages.some(each => each.lost) ? 38 : messages.length ? 30 : 14
    const pitch = Math.max(width < 480 ? 50 : 36, thick + flightRows * 6 + gap)
    geometry = { width, left, count, cell, whole, top, pitch, thick, height: top + ranks * pitch - (gap > 14 ? 10 : 0) }
    main.style.setProperty("--least", `${geometry.height + space + 300}px`)
  }
  const x = at => geometry.left + (at - from) * geometry.cell
  const y = rank => geometry.top + 4 + rank * geometry.pitch

  const arrow = (each, active) => {
    const { cell, thick, pitch, left, width } = geometry
    const a = [x(each.send.tick) + cell / 2, y(each.send.rank) + thick / 2], b = [x(each.receive.tick) + cell / 2, y(each.receive.rank) + thick / 2]
    if (Math.max(a[0], b[0]) < left || Math.min(a[0], b[0]) > width) return ""
    const down = Math.sign(b[1] - a[1]) || 1, off = active || each === chosen ? "" : " off"
    const begin = [a[0], a[1] + down * thick / 2], stop = [b[0], b[1] - down * thick / 2]
    const lost = each.lost ? " lost" : "", style_ = style(each.send.rank)
    if (each.lost) { // it never arrives
      const reach = down * (pitch - thick) * (down > 0 ? 0.7 : 0.75)
      if (each.lost === "send") stop[1] = begin[1] + reach
      else begin[1] = stop[1] - reach
      stop[0] = Math.min(width - 90, begin[0] + 1.2 * cell)
    }
    const [dx, dy] = [stop[0] - begin[0], stop[1] - begin[1]], length = Math.hypot(dx, dy) || 1
    const [ux, uy] = [dx / length, dy / length], path = `M${begin.map(n => n.toFixed(1))}L${stop.map(n => n.toFixed(1))}`
    const tip = [[0, 0], [-8, 3.5], [-8, -3.5]].map(([p, q]) => `${(stop[0] + p * ux - q * uy).toFixed(1)},${(stop[1] + p * uy + q * ux).toFixed(1)}`).join(" ")
    const cut = each.lost ? words("red", stop[0] + 2, stop[1] + 4, each.lost === "send" ? `✕ for rank ${each.receive.rank}` : `✕ from rank ${each.send.rank}`) : `<polygon class="head${off}" points="${tip}"/>`
    const at = clamp(0, (x(tick) + cell / 2 - begin[0]) / (dx || 1), 1)
    const dot = active && !each.lost ? `<circle class="head" r="4.5" cx="${begin[0] + at * dx}" cy="${begin[1] + at * dy}"/>` : ""
    return { begin, stop, active, each, html: `<g ${style_}><path class="arrow${off}${lost}${each === chosen ? " chosen" : ""}" d="${path}"/>${cut}${dot}`
      + `<path class="grab" data-message="${messages.indexOf(each)}" d="${path}"><title>${escaped(long(each))}</title></path></g>` }
  }
  const placed = []
  const pill = ({ begin, stop, each }) => { // the label of an arrow, where no other label is
    const text = [label(each), each.payload && inBytes(each.payload.b)].filter(Boolean).join(" · "), width = text.length * 5.9 + 10
    const hops = Math.max(1, Math.abs(each.send.rank - each.receive.rank))
    const gaps = [0, 0.55, -0.55].flatMap(shift => upTo(hops).map(i => [(i + 0.5) / hops, shift * width]))
    for (const [part, shift] of gaps) {
      const cx = clamp(geometry.left + width / 2, begin[0] + part * (stop[0] - begin[0]) + shift, geometry.width - width / 2 - 2)
      const cy = begin[1] + part * (stop[1] - begin[1])
      const free = placed.every(other => Math.abs(other.cx - cx) > (other.width + width) / 2 + 2 || Math.abs(other.cy - cy) > 18)
      if (!free) continue
      placed.push({ cx, cy, width })
      return `<g ${style(each.send.rank)}>${rect("pill", cx - width / 2, cy - 8, width, 16, 'rx="8"')}${words("mid", cx, cy + 4, text)}</g>`
    }
    return ""
  }

  const paintLanes = states => {
    const { width, left, count, cell, whole, pitch, thick, height } = geometry
    if (tick < from + 2 || tick > from + count - 4) from = clamp(1, tick - Math.round(count * (tick < from + 2 ? 0.6 : 0.3)), Math.max(1, whole - count + 1))
    const visible = each => each.to >= from && (each.tick ?? each.from) <= from + count
    const parts = [], names = [rect("back", 0, 14, left - 3, height - 14)]
    const right = x(Math.min(from + count, last + 1))
    for (let at = from; at < from + count && at <= last; at++) {
      if (at === tick || (at % 5 === 0 && Math.abs(at - tick) > 1)) parts.push(words(`${at === tick ? "b" : "soft"} mid`, x(at) + cell / 2, 11, at))
    }
    const labels = []
    for (const { all: each, row, from: begin, to } of boxes) {
      if (to < from || begin > from + count) continue
      const bad = each.missing.length || each.mismatch ? " bad" : ""
      const here = each.parts.map(part => trace.operations[part].rank).sort((a, b) => a - b)
      const x0 = Math.max(left - 4, x(begin) + 1.5), x1 = Math.min(width - 1, x(to) - 1.5), y0 = 16 + Math.min(row, boxRows - 1) * 17
      const adjacent = here.at(-1) - here[0] === here.length - 1
      const spans = adjacent ? [[here[0] === 0 ? y0 : y(here[0]) - 5, y(here.at(-1)) + thick + flightRows * 6 + 3]] : here.map(rank => [y(rank) - 5, y(rank) + thick + flightRows * 6 + 3])
      const index = collectives.indexOf(each), space = Math.min(x1, width) - x0
      const name = label(each), all = `${name} · ${payloadText(trace.operations[each.parts[0]].payload)}`, text = all.length * 6 < space ? all : name
      for (const [a, b] of spans) parts.push(rect(`box${bad}${each === chosen ? " chosen" : ""}`, x0, a, Math.max(3, x1 - x0), b - a, `data-collective="${index}" rx="4"`).replace("/>", `><title>${escaped(long(each))}</title></rect>`))
      const start = Math.max(left, Math.min(x0 + 4, width - text.length * 6.4))
      labels.push({ bad, text, start, y: y0 + 13, end: start + text.length * 6.4, now: begin <= tick && tick <= to })
    }
    // A label that would cover a different one is left out. The labels of this moment come first.
    labels.sort((a, b) => b.now - a.now).forEach((each, index) => {
      const clear = labels.slice(0, index).every(other => other.hidden || other.y !== each.y || each.end <= other.start || other.end <= each.start)
      each.hidden = !clear
      if (clear) parts.push(words(each.bad ? "red" : "b", each.start, each.y, each.text))
    })
    upTo(ranks).forEach(rank => {
      parts.push(rect("track", left, y(rank), right - left, thick))
      for (const each of segments[rank].filter(visible)) {
        const x0 = Math.max(left, x(each.tick)), x1 = Math.min(width, x(each.to))
        if (x1 <= x0) continue
        parts.push(bar(`${id}${rank}`, each.how, x0 + 0.5, y(rank), x1 - x0 - 1, thick, style(rank), each.never ? " never" : ""))
        if (each.how === "computes" && x1 - x0 > 16) parts.push(words(`mid${each.kind === "line" ? "" : " soft"}${each.line > 99 && cell < 26 ? " tiny" : ""}`, (x0 + x1) / 2, y(rank) + 15, each.line))
        else if (each.how !== "computes" && x1 - x0 > 44) {
          const text = each.never ? "never returns" : each.how === "joins" ? "" : each.how, middle = (x0 + x1) / 2, half = text.length * 3.1 + 3
          if (text && half * 2 < x1 - x0) parts.push(rect("back", middle - half, y(rank) + 4, half * 2, 14, 'rx="2"'), words(each.never ? "mid red" : "mid", middle, y(rank) + 15, text))
        }
      }
      const gone = segments[rank].at(-1), { how } = trace.ends[rank]
      if (gone && !gone.never && gone.to <= from + count && ["killed", "aborted", "terminated", "raised", "error"].includes(how)) {
        parts.push(words("red", x(gone.to) + 3, y(rank) + 15, `✕ ${how}`))
      }
      for (const each of flights[rank].filter(visible)) {
        const x0 = Math.max(left, x(each.from) + cell / 2), x1 = Math.min(width, x(each.to) + cell / 2)
        if (x1 > x0) parts.push(bar(`${id}${rank}`, each.how, x0, y(rank) + thick + 1 + Math.min(each.row, 3) * 6, x1 - x0, 5, style(rank)))
      }
      const state = states[rank], text = doing(made, state, rank)
      names.push(`<foreignObject x="0" y="${y(rank) - 3}" width="${left - 6}" height="${pitch}"><div xmlns="http://www.w3.org/1999/xhtml" class="tv-name">`
        + `${chip(rank, state)} <b>${state.line ? `line ${state.line}` : ""}</b><br>${escaped(text)}</div></foreignObject>`)
    })
    placed.length = 0
    const arrows = messages.map(each => arrow(each, each.send.tick <= tick && tick <= each.receive.tick)).filter(Boolean)
    parts.push(rect("column", x(tick), 14, cell, height - 16))
    parts.push(...arrows.map(each => each.html), ...arrows.filter(({ active, each }) => !each.lost && (active || each === chosen)).sort((a, b) => (b.each === chosen) - (a.each === chosen)).map(pill), ...names)
    lanes.setAttribute("viewBox", `0 0 ${width} ${height}`)
    lanes.setAttribute("height", height)
    lanes.innerHTML = `<defs>${upTo(ranks).map(rank => patterns(`${id}${rank}`, style(rank))).join("")}</defs>${parts.join("")}`
  }

  const paintOverview = () => {
    const width = Math.max(280, overview.parentElement.clientWidth)
    const high = 9, height = ranks * high + 6, scale = width / last, at = value => (value - 1) * scale
    const parts = segments.flatMap((row, rank) => {
      const runs = []
      for (const { how, tick: begin, to } of row) {
        if (how !== "computes") continue
        if (runs.at(-1)?.to === begin) runs.at(-1).to = to
        else runs.push({ begin, to })
      }
      return runs.map(each => rect("run", at(each.begin), 4 + rank * high, (Math.min(each.to, last + 1) - each.begin) * scale, high - 2, style(rank)))
    })
    for (const each of messages) {
      if (!each.lost) parts.push(`<line ${style(each.send.rank)} stroke="var(--e)" x1="${at(each.send.tick + 0.5)}" y1="${3 + (each.send.rank + 0.5) * high}" x2="${at(each.receive.tick + 0.5)}" y2="${3 + (each.receive.rank + 0.5) * high}"/>`)
    }
    for (const each of collectives) {
      parts.push(rect("all", at(each.from), 2, Math.max(2, (Math.min(each.to, last + 1) - each.from) * scale), height - 4))
    }
    overview.setAttribute("viewBox", `0 0 ${width} ${height}`)
    overview.setAttribute("height", height)
    overview.innerHTML = `${rect("track", 0, 0, width, height)}${parts.join("")}<g></g>`
    overview.dataset.scale = scale
  }
  const paintWindow = () => {
    const scale = Number(overview.dataset.scale), height = ranks * 9 + 6
    overview.lastChild.innerHTML = (geometry.count < last ? rect("window", (from - 1) * scale + 1, 1, geometry.count * scale - 2, height - 2) : "")
      + `<line class="cursor" x1="${(tick - 0.5) * scale}" y1="0" x2="${(tick - 0.5) * scale}" y2="${height}"/>`
  }

  // ---- the variables

  const functionName = number => trace.functions[number][0]?.replace(/^.*<locals>\./, "") ?? "the program"
  const order = [] // each function's variables in the order of their first change
  for (const [, , kind, , what, , changes] of trace.steps) {
    if (kind !== "line" && kind !== "return") continue
    let known = order.find(each => each.what === what)
    if (!known) order.push(known = { what, names: [] })
    for (const name of Object.keys(changes)) if (name !== "-" && !known.names.includes(name)) known.names.push(name)
  }
  const tensorCell = (value, changed) => {
    const contents = "state" in value ? `<span class="tv-state">${escaped(value.state)}</span>` : `<span class="${changed ? "changed" : ""}">${escaped(summary(value))}</span>`
    return `${contents}<small>${value.t} ${shapeOf(value.s)}</small>`
  }
  const strip = (value, before, same) => {
    const items = value.l ?? value.u, old = before?.l ?? before?.u ?? []
    if (!items.length || !items.every(isTensor)) return null
    const size = item => Math.abs("c" in item ? item.c[0] : item.v?.[0]) || 0, most = Math.max(...items.map(size)) || 1
    const cells = items.map((item, i) => {
      const text = "c" in item ? item.c[0] : "state" in item ? item.state : summary(item)
      const kind = [JSON.stringify(item) !== JSON.stringify(old[i]) && "changed", "state" in item && "tv-state"].filter(Boolean).join(" ")
      return `<span class="${kind}" data-i="${i}" style="--v:${Math.round(100 * size(item) / most)}%" title="${escaped(show(item))}">${same(i) ? "= " : ""}${escaped(text)}</span>`
    }).join("")
    return `<div class="tv-strip">${cells}${value.n > 8 ? "…" : ""}</div><small>${items.length} × ${items[0].t} ${shapeOf(items[0].s)}</small>`
  }
  const paintVariables = (states, before) => {
    const rowsOf = ({ what, names }) => {
      const frames = states.map(({ stack }) => stack.findLast(each => each.what === what))
      if (!frames.some(Boolean)) return ""
      const old = frames.map((frame, rank) => before[rank].stack.find(each => each.frame === frame?.frame)?.variables ?? {})
      const rows = names.filter(name => frames.some(frame => frame && name in frame.variables)).map(name => {
        const values = frames.map(frame => frame?.variables[name])
        const texts = values.map(value => JSON.stringify(value)), known = texts.filter(text => text !== undefined)
        const same = i => {
          const all = values.map(value => value && JSON.stringify((value.l ?? value.u ?? [])[i]))
          return ranks > 1 && all.every(each => each && each === all[0]) && !all[0].includes('"state"')
        }
        const equal = ranks > 1 && known.length === ranks && values.every(isTensor) && !("state" in values[0]) && texts.every(text => text === texts[0])
        const cells = values.map((value, rank) => {
          if (value === undefined) return "<td></td>"
          const changed = texts[rank] !== JSON.stringify(old[rank][name])
          const inside = isTensor(value) ? tensorCell(value, changed) : isList(value) && strip(value, old[rank][name], same)
          return `<td>${inside || `<span class="mono${changed ? " changed" : ""}">${escaped(show(value))}</span>`}</td>`
        })
        return `<tr><th scope="row" class="mono">${escaped(name)}${equal ? '<span class="tv-equal">= equal</span>' : ""}</th>${cells.join("")}</tr>`
      })
      return rows.length ? `<tr class="function"><th colspan="${ranks + 1}" scope="rowgroup">in ${escaped(functionName(what))}</th></tr>${rows.join("")}` : ""
    }
    const head = states.map((state, rank) => `<th scope="col">${chip(rank, state)} rank ${rank}</th>`).join("")
    const { scrollTop, scrollLeft } = table
    table.innerHTML = `<table class="tv-table"><thead><tr><th scope="col">variable</th>${head}</tr></thead><tbody>${order.map(rowsOf).join("")}</tbody></table>`
    Object.assign(table, { scrollTop, scrollLeft })
  }

  // ---- moving

  const paint = () => {
    const states = stateAt(made, tick), before = stateAt(made, tick - 1)
    output.textContent = `Tick ${tick} of ${last}`
    slider.value = tick
    slider.setAttribute("aria-valuetext", `tick ${tick} of ${last}`)
    back.disabled = tick === 1
    forward.disabled = tick === last
    paintLanes(states)
    paintWindow()
    paintNow(states)
    paintVariables(states, before)
    paintSource(states)
    place.dataset.tick = tick
  }
  let address = 0
  const move = to => {
    tick = clamp(1, to, last)
    paint()
    clearTimeout(address)
    if (location.protocol.startsWith("http")) {
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
    status.setAttribute("aria-live", "polite")
  }
  const go = to => {
    stop()
    move(to)
  }
  const start = () => {
    if (tick === last) move(1)
    play.textContent = "Pause"
    status.setAttribute("aria-live", "off")
    const next = () => {
      move(tick + 1)
      if (tick === last) stop()
      else timer = setTimeout(next, Number(speed.value))
    }
    timer = setTimeout(next, Number(speed.value))
  }
  box.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target === speed) return
    const press = event.target.matches("button,[role=button]") && [" ", "Enter"].includes(event.key)
    const act = { ArrowRight: () => go(tick + 1), ArrowLeft: () => go(tick - 1), Home: () => go(1), End: () => go(last),
      " ": () => timer ? stop() : start(), m: () => moments.message.length && go(nextOf("message")), c: () => moments.collective.length && go(nextOf("collective")) }[event.key]
    if (!act || press) return
    event.preventDefault()
    act()
  })
  const pointed = event => {
    const { left: edge, width } = lanes.getBoundingClientRect()
    return from + Math.floor(((event.clientX - edge) * (geometry.width / width) - geometry.left) / geometry.cell)
  }
  lanes.addEventListener("pointerdown", event => {
    const { message, collective } = event.target.dataset
    if (message !== undefined) return choose(messages[message])
    if (collective !== undefined) return choose(collectives[collective])
    pointer = true
    lanes.setPointerCapture(event.pointerId)
    go(clamp(from, pointed(event), from + geometry.count - 1))
  })
  lanes.addEventListener("pointermove", event => { if (pointer) go(pointed(event)) })
  for (const kind of ["pointerup", "pointercancel"]) lanes.addEventListener(kind, () => { pointer = false })

  const kinds = [["computes", "runs a line (its number)"], ["sends", "sends"], ["receives", "receives"], ["joins", "in a collective"], ["waits", "waits"]]
    .filter(([how]) => how === "computes" || segments.flat().some(each => each.how === how) || flights.flat().some(each => each.how === how))
  legend.innerHTML = kinds.map(([how, words]) => `<span><svg viewBox="0 0 24 13" aria-hidden="true">${bar(`${id}0`, how, 0.5, 0.5, 23, 12, style(0))}</svg>${words}</span>`).join("")
    + (flightRows ? `<span>thin bar: a transfer in the background</span>` : "")
  status.style.cssText = "clip-path:inset(50%);height:1px;overflow:hidden;position:absolute;width:1px;white-space:nowrap"
  place.replaceChildren(box, status)
  lay()
  paintOverview()
  paint()
  let width = place.clientWidth
  new ResizeObserver(() => {
    if ([0, width].includes(place.clientWidth)) return
    width = place.clientWidth
    lay()
    from = 1
    paintOverview()
    paint()
  }).observe(place)
  place.dataset.ready = ""
  return { go, made }
}

// Shows the trace that an element names, or the trace in the page itself.
export const start = async place => {
  const here = name => JSON.parse(document.getElementById(name).textContent)
  const { trace, sources } = place.dataset.trace ? await (await fetch(place.dataset.trace)).json()
    : { trace: here("trace-data"), sources: here("trace-sources") }
  return view(place, trace, sources)
}

const place = document.getElementById("trace-viewer")
if (place) start(place)
