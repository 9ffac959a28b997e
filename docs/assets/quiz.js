// The quiz: makes its lists into forms, judges an answer, keeps it, and counts.
// Without this script the page is whole, with its answers folded.
{
  const KEY = "world-size:quiz"

  const element = (tag, attributes = {}, ...children) => {
    const made = document.createElement(tag)
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value)
    made.append(...children)
    return made
  }

  const plain = text => text.replace(/\s+/g, " ").trim()
  const quoted = text => `“${plain(text)}”`
  const places = (value, below) =>
    Array.isArray(value) && new Set(value).size === value.length &&
    value.every(each => Number.isInteger(each) && each >= 0 && each < below)

  // What an explanation says, without the word that begins it.
  const said = item => plain(item.textContent).replace(/^(Right|Wrong)\. /, "")
  const yours = item => item.prepend(element("span", { class: "quiz-mark" }, "Your answer. "))
  const sign = (item, good, words) => item.append(
    element("span", { class: `quiz-mark quiz-sign ${good ? "quiz-good" : "quiz-bad"}` },
      `${good ? "✓" : "✗"} ${words}`))

  // "1,024", "12,5", "27.3 %", "3/11", "1e3", "1.02 kB": a value in the question's unit
  const parse = (text, units) => {
    const tidy = text.trim().replace(/[−–]/g, "-").replace(/^[≈~]\s*/, "")
      .replace(/(\d)[\s_](?=\d{3}(?!\d))/g, "$1")
    const match = /^([-+]?(?:\d[\d.,]*|\.\d+)(?:e[-+]?\d+)?)(?:\s*\/\s*(\d+))?\s*(.*)$/i.exec(tidy)
    if (!match) return { fault: "This is not a number." }
    const thousands = /^[-+]?\d{1,3}(,\d{3})+(?![\d,])/.test(match[1])
    const digits = thousands ? match[1].replaceAll(",", "") : match[1].replace(",", ".")
    const value = Number(digits) / Number(match[2] ?? 1)
    if (!Number.isFinite(value)) return { fault: "This is not a number." }
    const unit = plain(match[3]).replace(/\.$/, "")
    if (!Object.hasOwn(units, unit)) return { fault: `The unit ${quoted(unit)} is not known here.` }
    return { value: value * units[unit] }
  }

  // ---- the kinds. Each makes its controls and returns what the form needs: read() gives the
  // answer as it is kept, or says what is missing; valid(answer) and good(answer) judge one;
  // show(answer), or show() for none; mark(answer) marks it in the page and says what is wrong.

  const choices = box => {
    const several = box.dataset.kind === "several"
    const right = box.dataset.right.split(",").map(Number)
    const whys = [...box.querySelectorAll(".quiz-why > li")]
    const inputs = [...box.querySelectorAll(".quiz-options > li")].map((item, place) => {
      const id = `${box.dataset.quiz}-option-${place + 1}`
      const type = several ? "checkbox" : "radio"
      const label = element("label", { for: id }, ...item.childNodes)
      const input = element("input", { type, id, name: box.dataset.quiz, autocomplete: "off" })
      item.append(input, label)
      return input
    })
    return {
      read() {
        const answer = inputs.flatMap((input, place) => (input.checked ? [place] : []))
        return answer.length ? { answer } : { missing: "Choose an answer first." }
      },
      valid: answer =>
        places(answer, inputs.length) && (several ? answer.length > 0 : answer.length === 1),
      good: answer => answer.length === right.length && right.every(place => answer.includes(place)),
      show(answer = []) {
        inputs.forEach((input, place) => { input.checked = answer.includes(place) })
      },
      mark(answer) {
        const words = said(whys[answer[0]])
        inputs.forEach((input, place) => {
          const mine = answer.includes(place), good = right.includes(place)
          if (mine) yours(whys[place])
          if (mine) sign(input.parentElement, good, good ? "right" : "wrong")
          else if (good) sign(input.parentElement, true, "right, not chosen")
        })
        if (!several) return words
        const missing = right.filter(place => !answer.includes(place)).length
        const wrong = answer.filter(place => !right.includes(place)).length
        const parts = []
        if (wrong) parts.push(`${wrong} of your choices ${wrong > 1 ? "are" : "is"} wrong`)
        if (missing) parts.push(`${missing} ${missing > 1 ? "are" : "is"} missing`)
        return parts.length ? `${parts.join(", ")}.` : ""
      },
    }
  }

  const number = box => {
    const { answer: target, tolerance, unit } = box.dataset
    const units = JSON.parse(box.dataset.units)
    const id = `${box.dataset.quiz}-number`
    const input = element("input", { type: "text", id, size: "12", autocomplete: "off" })
    const label = element("label", { for: id }, unit ? `Your number (${unit})` : "Your number")
    box.querySelector("fieldset").append(element("p", { class: "quiz-number" }, label, " ", input))
    const near = (answer, value, share) =>
      Math.abs(parse(answer, units).value - value) <= share * Math.abs(value) + 1e-9
    return {
      read() {
        const answer = input.value.trim()
        if (!answer) return { missing: "Give a number first." }
        const { fault } = parse(answer, units)
        if (!fault) return { answer }
        return { missing: `${fault} ${unit ? `Give it in ${unit}.` : "Give the number alone."}` }
      },
      valid: answer => typeof answer === "string" && answer.length < 60 && !parse(answer, units).fault,
      good: answer => near(answer, Number(target), Number(tolerance)),
      show(answer = "") {
        input.value = answer
      },
      mark(answer) {
        if (near(answer, Number(target), Number(tolerance))) return ""
        const slips = [...box.querySelectorAll(".quiz-why > li")]
        const slip = slips.find(item => near(answer, Number(item.dataset.value), 0.02))
        if (!slip) return "The answer below explains the right number."
        const words = said(slip)
        yours(slip)
        return words
      },
    }
  }

  const order = (box, { tell, changed }) => {
    const list = element("ol", { class: "quiz-steps" }) // where a step stands is a number now
    const shown = [...box.querySelectorAll(".quiz-steps > li")]
    const steps = [...shown].sort((a, b) => a.dataset.step - b.dataset.step)
    const names = new Map(shown.map(item => [item, quoted(item.textContent.replace(/\.\s*$/, ""))]))
    const put = items => {
      list.append(...items)
      items.forEach((item, place) => {
        const [up, down] = item.querySelectorAll("button")
        // not disabled, or focus would be lost at the ends of the list
        up.setAttribute("aria-disabled", String(place === 0))
        down.setAttribute("aria-disabled", String(place === items.length - 1))
      })
    }
    const move = (item, by, button) => {
      const items = [...list.children]
      const from = items.indexOf(item), to = from + by
      if (to < 0 || to >= items.length) {
        tell(`${names.get(item)} is ${to < 0 ? "first" : "last"} already.`)
        return
      }
      items.splice(from, 1)
      items.splice(to, 0, item)
      put(items)
      button.focus() // which went with its step
      changed()
      tell(`${names.get(item)} is now ${to + 1} of ${items.length}.`)
    }
    for (const item of shown) {
      const buttons = [["Up", "↑", -1], ["Down", "↓", 1]].map(([name, arrow, by]) => {
        const label = `${name}: ${names.get(item)}`
        const button = element("button", { type: "button", "aria-label": label }, arrow)
        button.addEventListener("click", () => move(item, by, button))
        return button
      })
      const text = element("span", { class: "quiz-step" }, ...item.childNodes)
      item.append(element("span", { class: "quiz-moves" }, ...buttons), text)
    }
    box.querySelector("ul.quiz-steps").replaceWith(list)
    put(shown)
    const inPlace = answer => answer.filter((step, place) => step === place).length
    return {
      read: () => ({ answer: [...list.children].map(item => Number(item.dataset.step)) }),
      valid: answer => places(answer, steps.length) && answer.length === steps.length,
      good: answer => inPlace(answer) === answer.length,
      show(answer) {
        put(answer ? answer.map(step => steps[step]) : shown)
      },
      mark(answer) {
        answer.forEach((step, place) => {
          sign(steps[step], step === place, step === place ? "in its place" : "not in its place")
        })
        const first = answer.findIndex((step, place) => step !== place)
        if (first < 0) return ""
        return `${inPlace(answer)} of ${answer.length} are in the right place. The first that is ` +
          `not in its place is number ${first + 1}: ${names.get(steps[answer[first]])}.`
      },
    }
  }

  const KINDS = { one: choices, several: choices, output: choices, number, order }

  // ---- a question

  const question = (box, changed) => {
    const { quiz: id, version, lesson } = box.dataset
    const details = box.querySelector(".quiz-answer")
    const hint = box.querySelector(".quiz-hint")
    const list = box.querySelector(".quiz-options, .quiz-steps")
    const legend = element("legend", { id: `${id}-hint`, class: "quiz-hint" }, hint.textContent)
    const fieldset = element("fieldset", { "aria-labelledby": `${id}-text ${id}-hint` }, legend)
    const check = element("button", { type: "submit", class: "md-button" }, "Check")
    const verdict = element("p", { class: "quiz-verdict", role: "status" })
    const form = element("form", { class: "quiz-form" }, fieldset, check, verdict)
    if (list) fieldset.append(list)
    hint.replaceWith(form)

    const tell = text => { verdict.textContent = text }
    const unmark = () => {
      for (const each of box.querySelectorAll(".quiz-mark")) each.remove()
      verdict.classList.remove("quiz-good", "quiz-bad")
      tell("")
      details.hidden = true
    }
    const kind = KINDS[box.dataset.kind](box, { tell, changed: unmark })
    const judge = answer => {
      unmark()
      const good = kind.good(answer)
      const words = kind.mark(answer)
      verdict.classList.add(good ? "quiz-good" : "quiz-bad")
      tell(`${good ? "✓ Right." : "✗ Not right."} ${words}`.trim())
      details.hidden = false
      details.open = true
    }
    // What is kept of this question, if it can still be read: { answer, good, first }.
    const state = () => {
      const { v, answer, first } = kept.read(KEY)[id] ?? {}
      if (v !== version || !kind.valid(answer)) return null
      return { answer, good: kind.good(answer), first: first === true }
    }
    const show = () => {
      const now = state()
      kind.show(now?.answer)
      unmark()
      if (now) judge(now.answer)
    }

    fieldset.addEventListener("input", unmark)
    form.addEventListener("submit", event => {
      event.preventDefault()
      const { answer, missing } = kind.read()
      unmark()
      if (missing) {
        tell(missing)
        return
      }
      const first = state()?.first ?? kind.good(answer)
      kept.change(KEY, value => { value[id] = { v: version, answer, first } })
      judge(answer)
      verdict.append(` ${changed()}`)
    })
    show()
    const links = () => [...box.querySelectorAll(".quiz-read a")].map(link => link.cloneNode(true))
    return { lesson, links, show, state }
  }

  // ---- the result

  const result = (table, questions) => {
    const rows = [...table.querySelectorAll("tbody tr")]
    for (const name of ["right", "at the first try"]) {
      table.querySelector("thead tr").append(element("th", { style: "text-align: right" }, name))
      for (const row of rows) row.append(element("td", { style: "text-align: right" }))
    }
    const summary = element("p", { class: "quiz-summary" })
    const again = element("div", { class: "quiz-again" })
    const clear = element("button", { type: "button", class: "md-button" }, "Clear all answers")
    const cleared = element("span", { role: "status" })
    table.closest(".quiz-result").append(summary, again, element("p", {}, clear, " ", cleared))

    const count = () => {
      const states = questions.map(each => each.state())
      for (const row of rows) {
        const lesson = row.querySelector("a")?.hash.slice(1)
        const mine = states.filter((now, place) => now && (!lesson || questions[place].lesson === lesson))
        const [right, first] = [...row.children].slice(-2)
        right.textContent = mine.length ? mine.filter(now => now.good).length : "–"
        first.textContent = mine.length ? mine.filter(now => now.first).length : "–"
      }
      const done = states.filter(Boolean)
      const right = done.filter(now => now.good).length
      summary.textContent = `${done.length} of ${questions.length} answered, ${right} right, ` +
        `${done.filter(now => now.first).length} at the first try.`
      const links = new Map()
      states.forEach((now, place) => {
        if (now && !now.good) for (const link of questions[place].links()) links.set(link.href, link)
      })
      again.replaceChildren()
      if (links.size) {
        const items = [...links.values()].map(link => element("li", {}, link))
        again.append(element("p", {}, "Read again:"), element("ul", {}, ...items))
      }
      return `${done.length} of ${questions.length} answered.`
    }
    clear.addEventListener("click", () => {
      if (!confirm("Clear all answers of the quiz?")) return
      kept.change(KEY, value => { for (const id of Object.keys(value)) delete value[id] })
      for (const each of questions) each.show()
      count()
      cleared.textContent = "All answers are cleared."
    })
    return { count, cleared }
  }

  let all = []
  let shown = null

  const setUp = () => {
    const boxes = [...document.querySelectorAll(".quiz-question:not([data-ready])")]
    const table = document.querySelector(".quiz-result table")
    if (!boxes.length || !table) return
    const changed = () => {
      shown.cleared.textContent = ""
      return shown.count()
    }
    all = boxes.map(box => question(box, changed))
    shown = result(table, all)
    shown.count()
    for (const box of boxes) box.dataset.ready = ""
  }

  addEventListener("storage", ({ key }) => {
    if (key !== KEY && key !== null) return
    for (const each of all) each.show()
    shown?.count()
  })
  // The theme says when a page is there.
  if (window.document$) window.document$.subscribe(setUp)
  else setUp()
}
