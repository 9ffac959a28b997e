// Checklists that the browser remembers: which boxes are ticked, and nothing else, under one key.
// Without this script the boxes are there and forget.
{
  const KEY = "world-size:checklist"

  const boxesOf = list => [...list.querySelectorAll("input[type=checkbox]")]

  const show = list => {
    const ticked = kept.read(KEY)
    for (const box of boxesOf(list)) box.checked = ticked[box.id] === true
    count(list)
  }

  const count = list => {
    const boxes = boxesOf(list)
    const done = boxes.filter(box => box.checked).length
    const told = list.querySelector(".checklist-count")
    const text = `${done} of ${boxes.length} shown.`
    if (told.textContent !== text) told.textContent = text // said aloud only when it changes
    list.querySelector("button").disabled = done === 0
  }

  const setUp = () => {
    for (const list of document.querySelectorAll(".checklist:not([data-ready])")) {
      list.dataset.ready = ""
      const told = document.createElement("span")
      told.className = "checklist-count"
      told.setAttribute("role", "status")
      const clear = document.createElement("button")
      clear.type = "button"
      clear.className = "md-button"
      clear.textContent = "Clear these ticks"
      clear.addEventListener("click", () => {
        kept.change(KEY, value => { for (const box of boxesOf(list)) delete value[box.id] })
        show(list)
        boxesOf(list)[0]?.focus() // the button is disabled now, and focus must not be lost
      })
      list.addEventListener("change", ({ target }) => {
        if (target.type !== "checkbox") return
        kept.change(KEY, value => {
          if (target.checked) value[target.id] = true
          else delete value[target.id]
        })
        count(list)
      })
      const foot = document.createElement("p")
      foot.className = "checklist-foot"
      foot.append(told, clear)
      list.append(foot)
      show(list)
    }
  }

  addEventListener("storage", ({ key }) => {
    if (key !== KEY && key !== null) return
    for (const list of document.querySelectorAll(".checklist[data-ready]")) show(list)
  })
  // The theme says when a page is there.
  if (window.document$) window.document$.subscribe(setUp)
  else setUp()
}
