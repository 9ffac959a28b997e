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

const SENDS = ["send", "isend"], RECEIVES = ["recv", "irecv"]
const isSend = operation => SENDS.includes(operation.name)
const isReceive = operation => RECEIVES.includes(operation.name)

// Which part of a larger tensor a message carries: "part 2", if all parts have the same size, else its elements.
const partOf = payload => {
  if (!payload?.part) return ""
  const [first, whole] = payload.part, size = payload.s.reduce((a, b) => a * b, 1)
  if (size >= whole) return ""
  return first % size || whole % size ? `from element ${grouped(first)}` : `part ${first / size} of 0–${whole / size - 1}`
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
  const entered = {}
  for (const [tick, rank, kind, line, what] of steps) {
    if (kind === "line" || kind === "return") file[rank] = trace.functions[what][1]
    rows[rank].push({ tick, kind, line, file: file[rank], operations: typeof what === "number" ? [] : what })
    if (kind === "line") (entered[`${file[rank]}:${line}`] ??= []).push(tick)
    if (typeof what === "number") continue
    for (const each of what) {
      if (kind === "call" || kind === "start") ends[each].start ??= { tick, line }
      if (kind === "done" || kind === "waited") ends[each].end ??= { tick, line }
      if (kind === "wait") ends[each].wait ??= { tick, line }
    }
  }
  const segments = rows.map((row, rank) => row.map((step, i) => {
    const next = row[i + 1], first = operations[step.operations[0]]
    const how = step.kind === "wait" ? "waits" : step.kind !== "call" ? "computes"
      : isSend(first) ? "sends" : isReceive(first) ? "receives" : "joins"
    const never = !next && how !== "computes" && Boolean(trace.ends[rank].in)
    return { ...step, how, never, to: next ? next.tick : never ? last + 1 : step.tick + 1 }
  }))
  const endOf = (operation, which) => {
    const { start, end, wait } = ends[operation], found = { start, end, wait }[which]
    return { rank: operations[operation].rank, operation, ...(found ?? (which === "start" ? { tick: 0 } : { tick: last + 1 })) }
  }
  const messages = trace.messages.map(([send, receive]) =>
    ({ send: endOf(send, "start"), receive: endOf(receive, "end"), posted: endOf(receive, "start"), payload: operations[send].payload ?? operations[receive].payload }))
  const matched = new Set(trace.messages.flat())
  operations.forEach((operation, i) => { // sends that no rank receives, and receives without a send
    if (operation.peer === undefined || matched.has(i) || !ends[i].start || operation.end !== "never") return
    const here = endOf(i, "start"), there = { rank: operation.peer, tick: last + 1 }
    messages.push({ lost: isSend(operation) ? "send" : "receive", payload: operation.payload,
      ...isSend(operation) ? { send: here, receive: there } : { send: { rank: operation.peer, tick: here.tick }, receive: { ...there, rank: operation.rank }, posted: here } })
  })
  const collectives = trace.collectives.map(({ parts, missing = [], mismatch, group }) => {
    const from = Math.min(...parts.map(each => ends[each].start?.tick ?? 0))
    const to = Math.max(...parts.map(each => ends[each].end?.tick ?? last + 1))
    return { parts, missing, mismatch, group, from, to, names: [...new Set(parts.map(each => operations[each].name))] }
  })
  const flights = upTo(ranks).map(rank => operations.flatMap((operation, i) => operation.rank === rank && operation.async && ends[i].start
    ? [{ from: ends[i].start.tick, to: endOf(i, "end").tick, how: isSend(operation) ? "sends" : isReceive(operation) ? "receives" : "joins" }] : []))
  return { trace, ranks, last, rows, segments, ends, messages, collectives, flights: flights.map(inRows), entered }
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
export const stateAt = ({ trace, ranks, segments }, tick) => {
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
  return found
}

// For each rank, the line and the kind of its last step up to this tick; null before its first step.
export const positions = (trace, tick) => stateAt(model(trace), tick).map(({ line, kind }) => line ? [line, kind] : null)

const operationText = ({ trace }, number) => {
  const { name, peer, root } = trace.operations[number]
  if (peer !== undefined) return `${name} ${SENDS.includes(name) ? "to" : "from"} rank ${peer}`
  return root === undefined ? name : `${name} with root ${root}`
}

// What a rank does, in words.
const doing = (made, state, rank) => {
  const names = [...new Set(state.operations.map(each => made.trace.operations[each].name))].join(" and ")
  if (state.how === "before") return "has not begun"
  if (state.how === "ended") {
    const { how, status } = made.trace.ends[rank]
    return { finished: "has finished", exit: `exited with status ${status}`, raised: `ended with ${status}`, error: `received ${status}`,
      waiting: "was still waiting", killed: "was killed", terminated: "was ended by SIGTERM", aborted: "was aborted", running: "was still running" }[how]
  }
  if (state.how === "computes") return "computes"
  if (state.how === "waits") return `waits for ${names}`
  return state.never ? `waits in ${names}` : `is in ${names}`
}

// How the recording ends, in sentences.
const ending = made => {
  const { trace, last } = made
  const states = stateAt(made, last), groups = new Map()
  trace.ends.forEach((end, rank) => {
    const calls = end.in?.length ? ` in ${end.in.join(" and ")}` : "", line = end.line ? ` at line ${end.line}` : ""
    const text = {
      error: [`wait${calls}${line}`, end.status && `Later, this call raises ${end.status}`], waiting: [`wait${calls}${line}`],
      running: [`are${calls || " running"}${line}`], killed: [`were killed${line}`], aborted: [`wait${calls}${line}`, "Later, this process aborts"],
      terminated: [`were ended by SIGTERM${line}`], raised: [`ended with ${end.status}`], exit: [`exited with status ${end.status}`], finished: [""],
    }[end.how]
    const key = text.filter(Boolean).join("|")
    if (key) groups.set(key, [...groups.get(key) ?? [], rank])
  })
  const single = text => text.replace(/^wait\b/, "waits").replace(/^are\b/, "is").replace(/^were\b/, "was")
  const sentences = [...groups].map(([key, ranks]) => {
    const [text, later] = key.split("|")
    return `${named(ranks)} ${ranks.length > 1 ? text : single(text)}.${later ? ` ${ranks.length > 1 ? later.replace("this call raises", "these calls raise").replace("this process aborts", "these processes abort") : later}.` : ""}`
  })
  const hangs = trace.hangs.length > 0
  return { hangs, text: hangs ? `The program hangs here: from now on, no rank makes progress. ${sentences.join(" ")}` : sentences.join(" ") }
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

const CSS = `
.tv{--p:var(--paper,light-dark(#fff,#14191f));--i:var(--ink,light-dark(#1d252d,#d9dfe5));--s:var(--ink-soft,light-dark(#4d5965,#a3afba));--l:var(--rule,light-dark(#dde2e7,#303a45));--c:var(--paper-code,light-dark(#f5f7f9,#1b222a));--m:var(--paper-mark,light-dark(#e2eef5,#24384a));--a:var(--blue,light-dark(#0a5f85,#74c3e8));--x:var(--red,light-dark(#b0232a,#f4979b));color:var(--i);font:14px/1.4 var(--md-text-font-family,system-ui,sans-serif);margin:0 0 1rem}
.tv *{box-sizing:border-box}
.tv [style*="--h"]{--k:oklch(.5 .13 var(--h));--e:light-dark(oklch(.5 .13 var(--h)),oklch(.77 .11 var(--h)))}
.tv code,.tv pre,.tv .mono{font-family:var(--md-code-font-family,ui-monospace,monospace);font-size:12px}
.tv button,.tv select{background:var(--p);border:1px solid var(--s);border-radius:4px;color:var(--i);cursor:pointer;font:inherit;min-height:30px;padding:2px 10px}
.tv button:hover{background:var(--m)}
.tv button:disabled{border-color:var(--l);color:var(--s);cursor:default}
.tv :focus-visible{outline:2px solid var(--a);outline-offset:1px}
.tv-bar{align-items:center;display:flex;flex-wrap:wrap;gap:6px;margin-bottom:6px}
.tv .tv-play{background:var(--a);border-color:var(--a);color:var(--p);font-weight:650;min-width:72px}
.tv-bar output{font-variant-numeric:tabular-nums;font-weight:650;margin-left:auto}
.tv-over{position:relative}
.tv-over svg,.tv-lanes svg{display:block;user-select:none;-webkit-user-select:none;width:100%}
.tv-over input{cursor:ew-resize;height:100%;inset:0;margin:0;opacity:0;position:absolute;width:100%}
.tv-over:has(:focus-visible){outline:2px solid var(--a);outline-offset:1px}
.tv-main{display:grid;gap:8px 14px;grid-template:"lanes" auto "end" auto "now" auto "source" auto "variables" auto/minmax(0,1fr)}
.tv-source{background:var(--c);border:1px solid var(--l);border-radius:4px;grid-area:source;max-height:46svh;overflow:hidden auto;overscroll-behavior:auto;position:relative}
.tv-file{background:var(--c);color:var(--s);font-size:12px;padding:4px 8px}
.tv-line{display:grid;font:12px/1.5 var(--md-code-font-family,ui-monospace,monospace);grid-template-columns:calc(var(--n)*17px + 6px) 30px minmax(0,1fr)}
.tv-line>b{display:flex;gap:2px;padding:1px 2px}
.tv-line>i{color:var(--s);font-style:normal;padding-right:6px;text-align:right}
.tv-line>span{overflow-wrap:anywhere;padding-left:calc(var(--d)*1ch + 2ch);padding-right:6px;text-indent:calc(var(--d)*-1ch - 2ch);white-space:pre-wrap}
.tv-line[data-run]{cursor:pointer}
.tv-line[data-run]>i{color:var(--i);font-weight:650;text-decoration:underline dotted}
.tv-line[data-run]:hover{background:var(--m)}
.tv-line.now{background:color-mix(in oklab,var(--a) 15%,var(--c))}
.tv-line[data-end]{outline:2px solid var(--a);outline-offset:-2px}
.tv-line[data-end]>span::after{background:var(--a);border-radius:3px;color:var(--p);content:attr(data-note);display:inline-block;font:600 11px/1.4 var(--md-text-font-family,system-ui,sans-serif);margin-left:1ch;padding:0 5px;text-indent:0}
.tv .tv-fold{background:none;border:0;color:var(--a);display:block;font-size:12px;min-height:26px;padding:2px 8px}
.tv-line .keyword{color:var(--code-keyword,light-dark(#7b2a8c,#d8a6e6))}
.tv-line .string{color:var(--code-string,light-dark(#17653a,#8fd3a3))}
.tv-line .number{color:var(--code-number,light-dark(#9a3a06,#f2a873))}
.tv-line .comment{color:var(--code-comment,light-dark(#56626e,#9fabb6))}
.tv-chip{background:var(--k);border:2px solid var(--k);border-radius:4px;color:#fff;display:inline-block;font:700 11px/13px system-ui,sans-serif;height:17px;min-width:15px;padding:0 1px;text-align:center}
.tv-chip.waits{background:var(--p);border-color:var(--e);border-style:dashed;color:var(--e)}
.tv-chip.ended{background:var(--p);border-color:var(--e);color:var(--e)}
.tv-away{background:var(--p);border:1px solid var(--l);display:flex;gap:3px;font-size:12px;padding:2px 6px;position:sticky;width:max-content;z-index:1}
.tv-lanes{grid-area:lanes}
.tv-lanes svg{cursor:ew-resize;touch-action:pan-y}
.tv svg text{fill:var(--i);font:11px var(--md-text-font-family,system-ui,sans-serif);pointer-events:none}
.tv svg .b{font-weight:700}
.tv svg .soft{fill:var(--s)}
.tv svg .mid{text-anchor:middle}
.tv svg .red{fill:var(--x);font-weight:700}
.tv .track{fill:var(--c)}
.tv .computes{fill:color-mix(in oklab,var(--e) 24%,var(--p));stroke:var(--e)}
.tv .sends,.tv .receives,.tv .joins,.tv .waits{stroke:var(--e)}
.tv .waits{stroke-dasharray:3 2}
.tv .never{stroke:var(--x);stroke-width:2}
.tv .hatch{fill:none;stroke:var(--e);stroke-width:1.6}
.tv .dots{fill:var(--e)}
.tv .back{fill:var(--p)}
.tv .column{fill:var(--a);opacity:.16}
.tv .cursor{stroke:var(--a);stroke-width:2}
.tv .box{cursor:pointer;fill:var(--a);fill-opacity:.07;stroke:var(--a);stroke-width:1.5}
.tv .box.bad{fill:var(--x);stroke:var(--x);stroke-dasharray:5 3}
.tv .arrow{fill:none;pointer-events:none;stroke:var(--e);stroke-width:1.6}
.tv .arrow.off{opacity:.45}
.tv .arrow.lost{stroke:var(--x);stroke-dasharray:5 3}
.tv .head{fill:var(--e);pointer-events:none}
.tv .head.off{opacity:.45}
.tv .grab{cursor:pointer;fill:none;pointer-events:stroke;stroke:transparent;stroke-width:12}
.tv .chosen{stroke-width:3.5}
.tv .pill{fill:var(--p);pointer-events:none;stroke:var(--e)}
.tv .window{fill:none;stroke:var(--a);stroke-width:1.5}
.tv-legend{color:var(--s);display:flex;flex-wrap:wrap;font-size:12px;gap:2px 12px;margin:4px 0 0}
.tv-legend span{align-items:center;display:inline-flex;gap:4px}
.tv .tv-legend svg{flex:none;height:13px;width:24px}
.tv-end{border-left:4px solid var(--x);font-weight:600;grid-area:end;margin:0;padding:2px 8px}
.tv-end:empty{display:none}
.tv-now{border:1px solid var(--l);border-radius:4px;grid-area:now;min-height:118px;padding:6px 8px}
.tv .tv-now p{font-size:13px;margin:0 0 3px}
.tv-now ul{display:grid;gap:3px;list-style:none;margin:0;padding:0}
.tv .tv-now li{margin:0}
.tv .tv-now li>button{border-color:var(--l);font-size:13px;line-height:1.3;padding:3px 8px;text-align:left;width:100%}
.tv .tv-now button[aria-pressed=true]{border-color:var(--a);background:var(--m)}
.tv-both{border-top:1px solid var(--l);margin-top:6px;padding-top:5px}
.tv-both div{align-items:center;display:flex;flex-wrap:wrap;font-size:13px;gap:4px 8px;margin:2px 0}
.tv-both button{margin-left:auto}
.tv-variables{grid-area:variables;overflow:auto}
.tv .tv-variables table{border-collapse:collapse;font-size:12px;min-width:100%}
.tv-variables :is(th,td){border-bottom:1px solid var(--l);font-weight:400;padding:2px 8px 2px 4px;text-align:left;vertical-align:top}
.tv-variables thead th{background:var(--p);position:sticky;top:0}
.tv-variables .function th{color:var(--s);padding-top:6px}
.tv-variables tbody th{font-weight:650}
.tv-variables td{overflow-wrap:anywhere;font-variant-numeric:tabular-nums}
.tv-variables small{color:var(--s);display:block;font-size:11px}
.tv .changed{font-weight:700;text-decoration:underline;text-decoration-thickness:2px;text-underline-offset:2px}
.tv-strip{display:flex;flex-wrap:wrap;gap:2px}
.tv-strip span{border:1px solid var(--s);border-radius:2px;display:block;font-size:11px;padding:0 3px}
.tv-strip span::before{color:var(--s);content:attr(data-i) " ";font-size:10px}
.tv-strip .same{background:var(--m)}
.tv-state{background:repeating-linear-gradient(135deg,var(--l) 0 3px,transparent 3px 7px);border:1px dashed var(--s);border-radius:2px;padding:0 3px}
.tv-equal{border:1px solid var(--s);border-radius:3px;color:var(--s);font-size:10px;font-weight:400;margin-left:5px;padding:0 3px}
.tv-help{color:var(--s);font-size:12px;margin:4px 0 0}
@media (min-width:60em){
.tv-main{grid-template:"source lanes" auto "source end" auto "source now" auto "source variables" minmax(0,1fr)/minmax(0,11fr) minmax(0,12fr);height:clamp(620px,calc(100svh - 150px),900px)}
.tv-source{max-height:none}
}
@media print{
.tv-bar :is(button,select,label),.tv-over,.tv-fold,.tv-away,.tv-both{display:none!important}
.tv-main{display:block;height:auto}
.tv-source{max-height:none}
}
`

const hue = (rank, ranks) => Math.round(235 + (360 * rank) / ranks) % 360
const hueOf = (rank, ranks) => `style="--h:${hue(rank, ranks)}"`

// The patterns of the bars of a rank. They differ without colour, too.
const patterns = (id, style) => `
<pattern id="${id}sends" ${style} width="6" height="6" patternUnits="userSpaceOnUse"><rect class="back" width="6" height="6"/><path class="hatch" d="M-1 7 7-1M-1 1 1-1M5 7 7 5"/></pattern>
<pattern id="${id}receives" ${style} width="6" height="6" patternUnits="userSpaceOnUse"><rect class="back" width="6" height="6"/><path class="hatch" d="M-1-1 7 7M5-1 7 1M-1 5 1 7"/></pattern>
<pattern id="${id}joins" ${style} width="6" height="6" patternUnits="userSpaceOnUse"><rect class="back" width="6" height="6"/><path class="hatch" d="M0 3H6M3 0V6" stroke-width="1"/></pattern>
<pattern id="${id}waits" ${style} width="6" height="6" patternUnits="userSpaceOnUse"><rect class="back" width="6" height="6"/><circle class="dots" cx="3" cy="3" r="1"/></pattern>`

const bar = (id, how, x, y, width, height, style, never = "") =>
  `<rect class="${how}${never}" ${style} x="${x}" y="${y}" width="${Math.max(1, width)}" height="${height}" rx="2"${how === "computes" ? "" : ` fill="url(#${id}${how})"`}/>`

// Shows a trace in `place`. `sources` has the text of each file.
export const view = (place, trace, sources) => {
  const made = model(trace), { ranks, last, segments, messages, collectives, flights, entered } = made
  const finale = ending(made)
  const first = new URLSearchParams(location.search).get("tick")
  let tick = clamp(1, Math.round(Number(first ?? place.dataset.tick ?? 1)) || 1, last)
  let chosen = null, from = 1, timer = 0, pointer = false, linked = 0
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
  const hang = finale.hangs ? [button("Show the hang", () => go(last))] : []
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
  const box = element("div", { class: "tv" }, element("style", {}, CSS), controls,
    element("div", { class: "tv-over" }, overview, slider), main,
    element("p", { class: "tv-help" }, "Keys: ← and → move by one tick, Home and End move to the first and to the last tick, the space bar plays. "
      + `${jumps.length ? `${joined(Object.keys(moments).filter(kind => moments[kind].length).map(kind => `“${kind[0]}” moves to the next ${kind}`))}. ` : ""}`
      + "A click on a line moves to its next execution. A click on an arrow or on a box shows all of its ends."))

  // ---- the source: long parts that were not recorded are folded

  const lineElements = {}
  sources.forEach((text, file) => {
    if (sources.length > 1) source.append(element("div", { class: "tv-file" }, trace.files[file]))
    const all = coloured(text.replace(/\n$/, ""))
    const used = all.map((_, i) => entered[`${file}:${i + 1}`] || trace.steps.some(step => step[3] === i + 1 && step[2] !== "line" && file === 0))
    const near = used.map((_, i) => used.slice(Math.max(0, i - 4), i + 4).some(Boolean))
    let i = 0
    while (i < all.length) {
      let until = i
      while (until < all.length && near[until] === near[i]) until++
      const lines = all.slice(i, until).map((html, k) => {
        const number = i + k + 1, key = `${file}:${number}`, indent = text.split("\n")[number - 1].match(/^ */)[0].length
        const content = element("span", { style: `--d:${indent}` })
        content.innerHTML = html || " "
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
  const away = [element("div", { class: "tv-away", style: "top:0" }), element("div", { class: "tv-away", style: "bottom:0" })]

  const paintSource = states => {
    const marked = new Map()
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
    for (const each of chosenEnds()) {
      const line = lineElements[`${each.file ?? 0}:${each.line}`]
      if (!line) continue
      line.dataset.end = ""
      const span = line.lastChild
      span.dataset.note = line.dataset.noted === String(linked) && span.dataset.note !== each.word ? `${span.dataset.note}, ${each.word}` : each.word
      line.dataset.noted = linked
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
        const { rank, name, line } = trace.operations[each], { start, end: stop } = made.ends[each]
        return { rank, line, tick: start?.tick, word: name, text: `Rank ${rank} enters ${name} at line ${line}${stop ? "" : ", and it never returns"}.` }
      })
    }
    const { send, receive, posted, lost } = chosen, found = []
    if (lost !== "receive") found.push({ ...send, word: "send", text: `Rank ${send.rank} sends at line ${send.line ?? "?"}.` })
    if (lost !== "send") {
      const post = posted.line && posted.line !== receive.line ? ` starts to receive at line ${posted.line}, and` : ""
      const has = lost ? ` waits at line ${posted.line}, but no rank sends` : ` has the message at line ${receive.line ?? "?"}`
      found.push({ ...receive, line: receive.line ?? posted.line, word: "receive", text: `Rank ${receive.rank}${lost ? "" : post}${has}.` })
    }
    if (lost === "send") found.push({ rank: receive.rank, text: `Rank ${receive.rank} never receives this message.` })
    return found
  }
  const label = each => each.parts
    ? `${joined(each.names)}${each.missing.length ? ` without ${named(each.missing).toLowerCase()}` : ""}${each.mismatch ? `: different ${each.mismatch}` : ""}`
    : `${partOf(each.payload).split(" of ")[0] || `${each.payload?.t ?? ""} ${each.payload ? shapeOf(each.payload.s) : ""}`}`
  const long = each => {
    if (!each.parts) {
      const value = contentOf(each.payload)
      const text = `rank ${each.send.rank} → rank ${each.receive.rank}: ${payloadText(each.payload)}${value ? ` · ${value}` : ""}`
      return each.lost ? `${text} · ${each.lost === "send" ? "nobody receives it" : "nobody sends it"}` : text
    }
    const { payload, reduce } = trace.operations[each.parts[0]]
    return `${label(each)}${reduce ? ` (${reduce})` : ""}: ${payloadText(payload)}${each.missing.length || each.mismatch ? "" : `, ${each.parts.length} ranks`}`
  }
  const choose = each => {
    chosen = chosen === each ? null : each
    paint()
  }
  const paintNow = states => {
    const active = [...collectives.filter(each => each.from <= tick && tick <= each.to), ...messages.filter(each => each.send.tick <= tick && tick <= each.receive.tick)]
    const shown = chosen && !active.includes(chosen) ? [chosen, ...active] : active
    const groups = new Map()
    states.forEach((state, rank) => {
      const key = `${doing(made, state, rank)}|${state.line ?? ""}`
      groups.set(key, [...groups.get(key) ?? [], rank])
    })
    const sentence = [...groups].map(([key, here]) => {
      const [what, line] = key.split("|"), many = here.length > 1
      const verb = many ? what.replace(/^computes/, "compute").replace(/^waits/, "wait").replace(/^is /, "are ").replace(/^has /, "have ").replace(/^was /, "were ") : what
      return `${named(here)} ${verb}${line ? ` at line ${line}` : ""}.`
    }).join(" ")
    const said = element("p", {}, sentence)
    status.textContent = `Tick ${tick} of ${last}. ${sentence}`
    const items = shown.slice(0, 6).map(each => element("li", {}, button(long(each), () => choose(each), { "aria-pressed": each === chosen })))
    const rest = shown.length > 6 ? [element("li", {}, `and ${shown.length - 6} more`)] : []
    now.replaceChildren(said, element("ul", {}, ...items, ...rest))
    if (!shown.length && (messages.length || collectives.length)) now.append(element("p", {}, "No message is on its way."))
    const ends = chosenEnds()
    if (ends.length) {
      now.append(element("div", { class: "tv-both" }, ...ends.map(each => {
        const text = element("span")
        text.innerHTML = chip(each.rank, { how: "computes", operations: [] })
        const go_ = each.tick > 0 && each.tick <= last && each.line ? [button(`Go to tick ${each.tick}`, () => go(each.tick))] : []
        return element("div", {}, text, each.text, ...go_)
      })))
    }
    end.textContent = tick === last ? finale.text : ""
  }

  // ---- the lanes

  const id = `tv${Math.random().toString(36).slice(2, 7)}-`
  const flightRows = Math.min(4, Math.max(0, ...flights.flat().map(each => each.row + 1)))
  const boxes = inRows(collectives.map(each => ({ ...each, to: each.to + 1, all: each })))
  const boxRows = Math.min(6, Math.max(0, ...boxes.map(each => each.row + 1)))
  let geometry
  const lay = () => {
    const width = Math.max(280, lanes.parentElement.clientWidth)
    const left = width < 480 ? 78 : 122, least = width < 480 ? 20 : 22
    const count = Math.min(last, Math.max(4, Math.floor((width - left) / least)))
    const cell = Math.min(64, (width - left) / count), thick = 22
    const top = 16 + boxRows * 17, gap = messages.length ? 30 : 14
    const pitch = thick + flightRows * 6 + gap
    geometry = { width, left, count, cell, top, pitch, thick, height: top + ranks * pitch - gap + 8 }
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
      stop[0] = Math.min(width - 8, begin[0] + 1.4 * cell)
      const reach = Math.min(pitch * 0.7, Math.abs(stop[1] - begin[1]))
      if (each.lost === "send") stop[1] = begin[1] + down * reach
      else begin[1] = stop[1] - down * reach
    }
    const [dx, dy] = [stop[0] - begin[0], stop[1] - begin[1]], length = Math.hypot(dx, dy) || 1
    const [ux, uy] = [dx / length, dy / length], path = `M${begin.map(n => n.toFixed(1))}L${stop.map(n => n.toFixed(1))}`
    const tip = [[0, 0], [-8, 3.5], [-8, -3.5]].map(([p, q]) => `${(stop[0] + p * ux - q * uy).toFixed(1)},${(stop[1] + p * uy + q * ux).toFixed(1)}`).join(" ")
    const cut = each.lost ? `<text class="red mid" x="${stop[0]}" y="${stop[1] + 4}">✕</text>` : `<polygon class="head${off}" points="${tip}"/>`
    const at = clamp(0, (x(tick) + cell / 2 - begin[0]) / (dx || 1), 1)
    const dot = active && !each.lost ? `<circle class="head" r="4.5" cx="${begin[0] + at * dx}" cy="${begin[1] + at * dy}"/>` : ""
    return { begin, stop, active, each, html: `<g ${style_}><path class="arrow${off}${lost}${each === chosen ? " chosen" : ""}" d="${path}"/>${cut}${dot}`
      + `<path class="grab" data-message="${messages.indexOf(each)}" d="${path}"><title>${escaped(long(each))}</title></path></g>` }
  }
  const placed = []
  const pill = ({ begin, stop, each }) => { // the label of an arrow, where no other label is
    const words = [label(each), each.payload && inBytes(each.payload.b)].filter(Boolean).join(" · "), width = words.length * 5.9 + 10
    const hops = Math.max(1, Math.abs(each.send.rank - each.receive.rank))
    for (const part of [0.5 / hops, 0.5, 1 - 0.5 / hops, 0.3 / hops, 0.75, 0.2]) {
      const cx = clamp(geometry.left + width / 2, begin[0] + part * (stop[0] - begin[0]), geometry.width - width / 2 - 2)
      const cy = begin[1] + part * (stop[1] - begin[1])
      const free = placed.every(other => Math.abs(other.cx - cx) > (other.width + width) / 2 + 2 || Math.abs(other.cy - cy) > 18)
      if (!free) continue
      placed.push({ cx, cy, width })
      return `<g ${style(each.send.rank)}><rect class="pill" x="${cx - width / 2}" y="${cy - 8}" width="${width}" height="16" rx="8"/><text class="mid" x="${cx}" y="${cy + 4}">${escaped(words)}</text></g>`
    }
    return ""
  }

  const paintLanes = states => {
    const { width, left, count, cell, top, pitch, thick, height } = geometry
    if (tick < from + 2 || tick > from + count - 4) from = clamp(1, tick - Math.round(count * (tick < from + 2 ? 0.6 : 0.3)), Math.max(1, last - count + 1))
    const visible = each => each.to >= from && (each.tick ?? each.from) <= from + count
    const parts = []
    const right = x(Math.min(from + count, last + 1))
    for (let at = from; at < from + count && at <= last; at++) {
      if (at === tick || (at % 5 === 0 && Math.abs(at - tick) > 1)) parts.push(`<text class="${at === tick ? "b" : "soft"} mid" x="${x(at) + cell / 2}" y="11">${at}</text>`)
    }
    for (const { all: each, row, from: begin, to } of boxes) {
      if (to < from || begin > from + count) continue
      const bad = each.missing.length || each.mismatch ? " bad" : ""
      const here = each.parts.map(part => trace.operations[part].rank).sort((a, b) => a - b)
      const x0 = Math.max(left - 4, x(begin) + 1.5), x1 = Math.min(width - 1, x(to) - 1.5), y0 = 16 + Math.min(row, boxRows - 1) * 17
      const adjacent = here.at(-1) - here[0] === here.length - 1
      const spans = adjacent ? [[here[0] === 0 ? y0 : y(here[0]) - 5, y(here.at(-1)) + thick + flightRows * 6 + 3]] : here.map(rank => [y(rank) - 5, y(rank) + thick + flightRows * 6 + 3])
      const index = collectives.indexOf(each), words = label(each), fits = words.length * 6 < x1 - x0 + 60
      for (const [a, b] of spans) parts.push(`<rect class="box${bad}${each === chosen ? " chosen" : ""}" data-collective="${index}" x="${x0}" y="${a}" width="${Math.max(3, x1 - x0)}" height="${b - a}" rx="4"><title>${escaped(long(each))}</title></rect>`)
      parts.push(`<text class="${bad ? "red" : "b"}" x="${Math.min(x0 + 4, width - (fits ? words.length * 6 + 8 : 20))}" y="${y0 + 13}">${escaped(words)}</text>`)
    }
    upTo(ranks).forEach(rank => {
      parts.push(`<rect class="track" x="${left}" y="${y(rank)}" width="${right - left}" height="${thick}"/>`)
      for (const each of segments[rank].filter(visible)) {
        const x0 = Math.max(left, x(each.tick)), x1 = Math.min(width, x(each.to))
        if (x1 <= x0) continue
        parts.push(bar(`${id}${rank}`, each.how, x0 + 0.5, y(rank), x1 - x0 - 1, thick, style(rank), each.never ? " never" : ""))
        if (each.how === "computes" && each.kind === "line" && x1 - x0 > 16) parts.push(`<text class="mid" x="${(x0 + x1) / 2}" y="${y(rank) + 15}">${each.line}</text>`)
        else if (each.how !== "computes" && x1 - x0 > 44) {
          const words = each.never ? "never returns" : each.how === "joins" ? "" : each.how
          if (words && words.length * 6 < x1 - x0 - 6) {
            parts.push(`<rect class="back" x="${(x0 + x1) / 2 - words.length * 3.1 - 3}" y="${y(rank) + 4}" width="${words.length * 6.2 + 6}" height="14" rx="2"/><text class="mid${each.never ? " red" : ""}" x="${(x0 + x1) / 2}" y="${y(rank) + 15}">${words}</text>`)
          }
        }
      }
      const gone = segments[rank].at(-1), { how } = trace.ends[rank]
      if (gone && !gone.never && gone.to <= from + count && ["killed", "aborted", "terminated", "raised", "error"].includes(how)) {
        parts.push(`<text class="red" x="${Math.min(x(gone.to) + 3, width - 50)}" y="${y(rank) + 15}">✕ ${how}</text>`)
      }
      for (const each of flights[rank].filter(visible)) {
        const x0 = Math.max(left, x(each.from) + cell / 2), x1 = Math.min(width, x(each.to) + cell / 2)
        if (x1 > x0) parts.push(bar(`${id}${rank}`, each.how, x0, y(rank) + thick + 1 + Math.min(each.row, 3) * 6, x1 - x0, 5, style(rank)))
      }
      const state = states[rank], small = left < 100, words = doing(made, state, rank)
      parts.push(`<foreignObject x="0" y="${y(rank) - 3}" width="${left - 6}" height="${pitch}"><div xmlns="http://www.w3.org/1999/xhtml" style="font:11px/14px system-ui,sans-serif;overflow:hidden;max-height:44px">`
        + `${chip(rank, state)} <b>${state.line ? `line ${state.line}` : ""}</b><br>${escaped(small ? words.split(" ").slice(0, 2).join(" ") : words)}</div></foreignObject>`)
    })
    placed.length = 0
    const arrows = messages.map(each => arrow(each, each.send.tick <= tick && tick <= each.receive.tick)).filter(Boolean)
    parts.push(`<rect class="column" x="${x(tick)}" y="14" width="${cell}" height="${height - 16}"/>`)
    parts.push(...arrows.map(each => each.html), ...arrows.filter(each => each.active || each.each === chosen).sort((a, b) => (b.each === chosen) - (a.each === chosen)).map(pill))
    lanes.setAttribute("viewBox", `0 0 ${width} ${height}`)
    lanes.setAttribute("height", height)
    lanes.innerHTML = `<defs>${upTo(ranks).map(rank => patterns(`${id}${rank}`, style(rank))).join("")}</defs>${parts.join("")}`
  }

  const paintOverview = () => {
    const { width, left } = { ...geometry, width: Math.max(280, overview.parentElement.clientWidth), left: 0 }
    const high = 9, height = ranks * high + 6, scale = width / last, at = value => left + (value - 1) * scale
    const parts = segments.flatMap((row, rank) => row.map(each =>
      `<rect class="${each.how === "computes" ? "computes" : "plain"}" ${style(rank)} x="${at(each.tick).toFixed(1)}" y="${3 + rank * high + 1}" width="${Math.max(0.5, (Math.min(each.to, last + 1) - each.tick) * scale).toFixed(1)}" height="${high - 2}" stroke="none" fill="${each.how === "computes" ? "" : "var(--l)"}"/>`))
    for (const each of messages) {
      if (!each.lost) parts.push(`<line ${style(each.send.rank)} stroke="var(--e)" x1="${at(each.send.tick + 0.5)}" y1="${3 + (each.send.rank + 0.5) * high}" x2="${at(each.receive.tick + 0.5)}" y2="${3 + (each.receive.rank + 0.5) * high}"/>`)
    }
    for (const each of collectives) {
      parts.push(`<rect class="box" x="${at(each.from)}" y="2" width="${Math.max(2, (each.to - each.from + 1) * scale)}" height="${height - 4}"/>`)
    }
    overview.setAttribute("viewBox", `0 0 ${width} ${height}`)
    overview.setAttribute("height", height)
    overview.innerHTML = `<rect class="track" width="${width}" height="${height}"/>${parts.join("")}<g></g>`
    overview.dataset.scale = scale
  }
  const paintWindow = () => {
    const scale = Number(overview.dataset.scale), height = ranks * 9 + 6
    overview.lastChild.innerHTML = (geometry.count < last ? `<rect class="window" x="${(from - 1) * scale + 1}" y="1" width="${geometry.count * scale - 2}" height="${height - 2}" rx="2"/>` : "")
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
    const cells = items.map((item, i) => {
      const text = "c" in item ? item.c[0] : "state" in item ? item.state : summary(item)
      const kind = [same(i) && "same", JSON.stringify(item) !== JSON.stringify(old[i]) && "changed", "state" in item && "tv-state"].filter(Boolean).join(" ")
      return `<span class="${kind}" data-i="${i}" title="${escaped(show(item))}">${same(i) ? "= " : ""}${escaped(text)}</span>`
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
    linked++
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
    + (flightRows ? `<span>thin bar: in the background</span>` : "")
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
