// What the instruments share: their controls, whose state is the address, and how numbers are written.

export const element = (tag, attributes = {}, ...inside) => {
  const made = document.createElement(tag)
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value)
  made.append(...inside)
  return made
}

// ---- numbers, as the programs write them

export const upTo = n => [...Array(n).keys()]
export const sum = values => values.reduce((a, b) => a + b, 0)
export const digits = x => x >= 1000 ? String(Math.floor(x + 0.5)) : String(Number(x.toPrecision(3)))

export const inBytes = x => {
  const [unit, size] = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]].find(u => x >= u[1]) ?? ["B", 1]
  return `${digits(x / size)} ${unit}`
}

export const inSeconds = x => {
  const [unit, scale] = [["s", 1], ["ms", 1e3]].find(u => x * u[1] >= 1) ?? ["µs", 1e6]
  return `${digits(x * scale)} ${unit}`
}

// Exponents are raised: 2^-4 becomes 2⁻⁴.
export const superscript = text => String(text).replace(/[-\d]/g, each => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(each)])

// Text for readers: a number and its unit stay on one line, and exponents are raised.
export const joined = text => text.replace(/(\d) (?=\S)/g, "$1\u00a0").replace(/\^(-?\d+)/g, (_, n) => superscript(n))

// ---- colours

// A colour for each of n things, the same in both colour schemes.
export const hue = (i, n) => `oklch(${i % 2 ? 0.45 : 0.56} 0.13 ${(235 + (360 * i) / n) % 360})`

// Black or white for text on a shape or on an HTML element, whichever has the higher contrast.
const inks = new Map()
let canvas
export const inkOn = shape => {
  const { fill, backgroundColor, opacity } = getComputedStyle(shape)
  const paper = getComputedStyle(document.body).getPropertyValue("--paper"), colour = shape.ownerSVGElement ? fill : backgroundColor
  const key = `${paper} ${colour} ${opacity}`
  if (!inks.has(key)) {
    canvas ??= new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true })
    for (const [alpha, style] of [[1, paper], [opacity, colour]]) {
      canvas.globalAlpha = alpha
      canvas.fillStyle = style
      canvas.fillRect(0, 0, 1, 1)
    }
    const [red, green, blue] = [...canvas.getImageData(0, 0, 1, 1).data]
      .map(byte => byte <= 10 ? byte / 3294 : ((byte / 255 + 0.055) / 1.055) ** 2.4)
    inks.set(key, 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.179 ? "#fff" : "#000")
  }
  return inks.get(key)
}

// ---- pictures and their values

// An SVG in a box. An element with data-tip="text" shows this text when the pointer, a finger or the arrow keys reach it.
export const drawing = caption => {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg")
  svg.setAttribute("role", "img")
  svg.setAttribute("aria-label", caption)
  const tip = element("p", { class: "instrument-tip", "aria-live": "polite" })
  const box = element("div", { class: "instrument-drawing" }, svg, tip)
  let at = -1, pointer
  const all = () => [...svg.querySelectorAll("[data-tip]")]
  const reveal = found => {
    svg.querySelector(".tipped")?.classList.remove("tipped")
    at = all().indexOf(found)
    tip.textContent = found ? joined(found.dataset.tip) : ""
    if (!found) return
    found.classList.add("tipped")
    const shape = found.getBoundingClientRect(), { left, top, width } = box.getBoundingClientRect()
    const middle = (shape.left + shape.right - tip.offsetWidth) / 2 - left, above = shape.top - top - tip.offsetHeight - 6
    tip.style.left = `${Math.max(0, Math.min(width - tip.offsetWidth, middle))}px`
    tip.style.top = `${above < 0 ? shape.bottom - top + 6 : above}px`
  }
  const follow = () => reveal(pointer && document.elementsFromPoint(...pointer).find(each => each.dataset?.tip && svg.contains(each)))
  for (const kind of ["pointerdown", "pointermove"]) {
    svg.addEventListener(kind, event => {
      pointer = [event.clientX, event.clientY]
      follow()
    })
  }
  const leave = () => {
    pointer = undefined
    reveal()
  }
  svg.addEventListener("pointerleave", event => event.pointerType === "mouse" && leave())
  svg.addEventListener("pointercancel", leave) // the finger scrolls the page
  document.addEventListener("pointerdown", event => at >= 0 && !svg.contains(event.target) && leave())
  svg.addEventListener("focus", () => svg.matches(":focus-visible") && reveal(all()[0]))
  svg.addEventListener("blur", leave)
  svg.addEventListener("keydown", event => {
    const last = all().length - 1, to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: last }[event.key]
    if (event.key === "Escape") leave()
    if (to === undefined) return
    event.preventDefault()
    pointer = undefined
    reveal(all()[Math.max(0, Math.min(last, to))])
  })
  svg.addEventListener("filled", () => { // shows the value at the same place of the new picture
    const some = all()
    svg.setAttribute("role", some.length ? "application" : "img")
    for (const [name, value] of [["tabindex", 0], ["aria-description", "Press the arrow keys to read the values in the picture."]]) {
      if (some.length) svg.setAttribute(name, value)
      else svg.removeAttribute(name)
    }
    if (pointer) follow()
    else if (at >= 0) reveal(some[at])
  })
  return { svg, box }
}

// Draws an SVG again. A text of the class "on" directly after a shape becomes black or white, for the higher contrast.
export const fill = (svg, width, height, inside) => {
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`)
  svg.setAttribute("width", width)
  svg.setAttribute("height", height)
  svg.innerHTML = inside
  for (const words of svg.querySelectorAll(".on")) words.style.fill = inkOn(words.previousElementSibling)
  svg.dispatchEvent(new Event("filled"))
}

// What an instrument shows: the picture, with elements above it. Below the controls come more elements, facts and a table.
export const picture = (caption, columns, { above = [], below = [] } = {}) => {
  const { svg, box } = drawing(caption)
  const terms = element("dl", { class: "instrument-facts" })
  const body = element("tbody")
  const head = columns.map(words => element("th", { scope: "col" }, words))
  const table = element("table", { class: "instrument-table" },
    element("caption", {}, caption), element("thead", {}, element("tr", {}, ...head)), body)
  const list = rows => terms.replaceChildren(...rows.map(([name, words]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, joined(words)))))
  // `others` has for each name the cells of a row, or one cell for the whole row. The row `best` has a word after a cell.
  const compare = (others, chosen, best, column, word) => body.replaceChildren(
    ...Object.entries(others).map(([name, cells]) => element("tr",
      name === chosen ? { "aria-current": "true" } : {}, element("th", { scope: "row" }, name),
      ...cells.map((words, i) => element("td", cells.length > 1 ? {} : { colspan: columns.length - 1 },
        joined(words), i === column && name === best ? ` · ${word}` : "")))))
  const busy = () => element("p", { class: "instrument-computing", "aria-live": "polite" })
  return { svg, table, list, compare, output: {
    stage: element("div", { class: "instrument-stage" }, ...above, box, busy()),
    below: element("div", { class: "instrument-picture" }, ...below, terms, busy(), table) } }
}

// Shows, instead of a result, that it is being computed. `what` is "picture" or "table", and it is empty at the end.
export const computing = (place, what) => {
  clearTimeout(place.computing)
  const say = () => {
    place.dataset.computing = what
    const texts = place.querySelectorAll(".instrument-computing")
    texts.forEach((each, i) => { each.textContent = what === ["picture", "table"][i] ? "Computing …" : "" })
  }
  if (what) {
    place.setAttribute("aria-busy", "true")
    place.computing = setTimeout(say, 120) // quick answers do not flicker
  } else {
    place.removeAttribute("aria-busy")
    say()
  }
}

// ---- an instrument

// The width to draw for: an element has none before the first layout, and none out of the page.
export const widthOf = place => Math.max(260, (place.querySelector(".instrument-stage") ?? place).clientWidth)

export const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches

// Whether an instrument is a small one in a chapter. It shows the picture and the main controls.
export const embedded = place => place.dataset.state !== undefined

// A control has a name (in the address), a label, options(state) → values, text(value, state), its
// first value, whether it is a slider, and whether it is a main control. A main control is below the picture, `at: true`
// puts it next to the buttons of a player, and the others are folded. A control that has valid(text) instead of options is a
// field to type in. A preset has a name and values. `show(state, tell)` draws, and returns the command that
// prints the same numbers. `demo` has the name of a control, perhaps values, and a beat in ms, for the page of all instruments.
export const instrument = (place, { controls, presets = [], show, output, bar, demo }) => {
  const state = {}, small = embedded(place), gallery = place.dataset.gallery !== undefined
  const asked = new URLSearchParams(place.dataset.state ?? location.search)
  const inputs = new Map()
  const status = element("p", { class: "instrument-status", role: "status" })
  const command = element("code")

  const firstOf = (first, state) => typeof first === "function" ? first(state) : first
  const settle = state => { // an option that is gone gives way to the nearest, or to the first
    for (const { name, options, first, valid } of controls) {
      if (valid) state[name] ??= first
      if (valid) continue
      const values = options(state)
      if (values.includes(state[name])) continue
      const near = state[name] ?? firstOf(first, state)
      state[name] = values.includes(near) ? near : typeof near === "number"
        ? values.reduce((best, each) => Math.abs(each - near) < Math.abs(best - near) ? each : best)
        : values[0]
    }
  }
  const read = (name, text, state) => {
    const { options, valid } = controls.find(each => each.name === name)
    return (valid ? [text].filter(valid) : options(state)).find(value => String(value) === text)
  }
  const resolve = given => { // all values, from given(name, values before it)
    const made = {}
    for (const { name } of controls) {
      const value = given(name, made)
      if (value !== undefined) made[name] = value
      settle(made)
    }
    return made
  }

  const paint = () => {
    for (const { name, options, text = String, slider, valid } of controls) {
      if (valid) {
        const field = inputs.get(name).input
        if (field !== document.activeElement) field.value = state[name]
        field.setAttribute("aria-invalid", false)
        continue
      }
      const { input, output } = inputs.get(name)
      const values = options(state)
      if (slider) {
        input.max = values.length - 1
        input.value = values.indexOf(state[name])
        output.textContent = text(state[name], state)
        input.setAttribute("aria-valuetext", output.textContent)
      } else {
        const words = values.map(value => text(value, state))
        if (input.dataset.words !== words.join()) {
          input.dataset.words = words.join()
          input.replaceChildren(...values.map((value, i) => element("option", { value }, words[i])))
        }
        input.value = state[name]
      }
      input.disabled = input.parentElement.hidden = values.length < 2
    }
    for (const { button, values } of ready) {
      button.setAttribute("aria-pressed", controls.every(({ name, at }) => at || state[name] === values[name]))
    }
  }

  const defaults = () => {
    const begin = {}
    for (const { name, first } of controls) begin[name] = firstOf(first, begin)
    return begin
  }
  const link = small && !gallery && place.querySelector("a[href*='instruments/']")
  let asks = 0
  const address = () => { // browsers refuse an address that changes all the time
    clearTimeout(asks)
    if (gallery || made.quiet) return // nobody has changed anything
    asks = setTimeout(() => {
      const url = new URL(link ? link.href : location), begin = defaults()
      for (const { name } of controls) {
        if (state[name] === begin[name]) url.searchParams.delete(name)
        else url.searchParams.set(name, state[name])
      }
      if (link) link.href = url
      else history.replaceState(history.state, "", url)
    }, 150)
  }

  const tell = text => { if (status.textContent !== text) status.textContent = text }
  const change = (changes = {}) => {
    Object.assign(state, changes)
    settle(state)
    paint()
    command.textContent = show(state, tell)
    address()
  }

  const button = (words, press) => {
    const made = element("button", { type: "button", class: "md-button" }, words)
    made.addEventListener("click", press)
    return made
  }
  const ready = presets.map(({ name, values }) => {
    const all = resolve(name => values[name])
    return { values: all, button: button(name, () => change(all)) }
  })

  const form = element("form", { class: "instrument-controls", "aria-label": "Settings" })
  const folded = element("form", { class: "instrument-controls", "aria-label": "More settings" })
  const more = element("details", { class: "instrument-more" }, element("summary", {}, "More settings"), folded)
  for (const { name, label, options, slider, main, at, valid, wide = "" } of controls) {
    const id = `${place.id}-${name}`
    const input = element(slider || valid ? "input" : "select",
      slider ? { id, type: "range", min: 0, step: 1, autocomplete: "off" }
        : valid ? { id, type: "text", autocomplete: "off", autocapitalize: "off", spellcheck: "false" } : { id })
    const output = element("span", { class: "instrument-value", "aria-hidden": "true" })
    inputs.set(name, { input, output })
    const box = at ? bar : main ? form : folded
    box.append(element("div", wide && { class: wide }, element("label", { for: id }, label), output, input))
    input.addEventListener("input", () => {
      const value = slider ? options(state)[input.value] : read(name, input.value.trim(), state)
      if (value !== undefined) return change({ [name]: value })
      input.setAttribute("aria-invalid", true)
      tell(`${label}: this input is not valid.`)
    })
  }
  for (const each of [form, folded]) each.addEventListener("submit", event => event.preventDefault())

  const copy = (text, what) => navigator.clipboard?.writeText(text).then(
    () => tell(`${what} is copied.`), () => tell("The browser does not allow this page to copy text."))
  const work = element("div", { class: "instrument-work" }, output.stage)
  const made = { state, change, button, play: () => {}, pause: () => {} }
  if (gallery) {
    for (const each of output.stage.children) each.inert = !each.matches(".instrument-drawing")
    place.querySelector("a").parentElement.before(work)
  } else {
    const row = element("p", { class: "instrument-presets", role: "group", "aria-label": "Examples" }, ...ready.map(each => each.button))
    work.append(...bar ? [bar] : [], ...ready.length && !small ? [row] : [], form, status)
    if (small) link.parentElement.before(work)
    else {
      if (folded.children.length) work.append(more)
      place.append(work, output.below,
        element("p", { class: "instrument-command" }, "The same numbers: ", command),
        element("p", { class: "instrument-foot" },
          button("Copy link", () => {
            const url = new URL(location)
            for (const { name } of controls) url.searchParams.set(name, state[name])
            copy(url.href, "The address of this view")
          }),
          button("Copy command", () => copy(command.textContent, "The command")),
          button("Start again", () => {
            for (const { name } of controls) delete state[name]
            change()
          })))
    }
  }
  // A touch that scrolls the page changes no slider.
  let before
  place.addEventListener("pointerdown", ({ target }) => { before = target.type === "range" && { ...state } })
  place.addEventListener("pointercancel", () => before && change(before))
  Object.assign(state, resolve((name, state) => asked.has(name) ? read(name, asked.get(name), state) : undefined))
  const begin = defaults()
  more.open = controls.some(({ name, main, at }) => !main && !at && state[name] !== begin[name])
  change()
  let width = place.clientWidth
  const again = () => show(state, () => {})
  new ResizeObserver(() => {
    if ([0, width].includes(place.clientWidth)) return
    width = place.clientWidth
    again()
  }).observe(place)
  // On a phone, the picture and the sentence stay in view together only if half of the window is left for the controls.
  // 0.44 is the limit of the picture in base.css, and 48 pixels are the header of the theme.
  const fit = new ResizeObserver(() => {
    const tall = output.stage.offsetHeight
    place.style.setProperty("--tall", `${tall}px`)
    status.style.position = Math.min(tall, 0.44 * innerHeight) + status.offsetHeight + 48 > innerHeight / 2 ? "static" : ""
  })
  if (!small) for (const each of [output.stage, status]) fit.observe(each)
  new MutationObserver(again).observe(document.body, { attributeFilter: ["data-md-color-scheme"] })
  if (gallery) move(place, made, controls, demo)
  place.dataset.ready = ""
  return made
}

// An instrument on the page of all instruments moves while it is in view, until the reader pauses it.
const move = (place, made, controls, demo) => {
  let timer = 0, moves = false, seen = false
  made.play = () => {
    const { options } = controls.find(each => each.name === demo.name)
    timer = setInterval(() => {
      if (place.hasAttribute("aria-busy")) return
      const values = demo.values ?? options(made.state)
      made.change({ [demo.name]: values[(values.indexOf(made.state[demo.name]) + 1) % values.length] })
    }, demo.beat ?? 900)
  }
  made.pause = () => clearInterval(timer)
  const run = () => {
    made.pause()
    if (moves && seen) made.play()
    toggle.textContent = moves ? "Pause" : "Play"
    toggle.setAttribute("aria-label", `${toggle.textContent}: ${place.querySelector("a").textContent}`)
  }
  const toggle = made.button("Pause", () => {
    moves = !moves
    run()
  })
  place.append(toggle)
  moves = !still()
  new IntersectionObserver(entries => {
    seen = entries.at(-1).isIntersecting
    run()
  }).observe(place)
}
