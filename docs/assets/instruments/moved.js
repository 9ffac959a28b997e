import { still } from "./base.js"

// Something drawn with data-drag="name" follows the pointer. move(name, x, began) gets the x of the pointer in
// the drawing, and the x at which the drag began. If the touch scrolls the page instead,
// the state from before the touch is restored.
export const draggable = (svg, { state, change }, move) => {
  let held, began, before
  const along = event => new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x
  svg.addEventListener("pointerdown", event => {
    held = event.target.dataset.drag
    if (!held) return
    event.preventDefault()
    svg.setPointerCapture(event.pointerId)
    began = along(event)
    before = { ...state }
    move(held, began, began)
  })
  svg.addEventListener("pointermove", event => { if (held) move(held, along(event), began) })
  svg.addEventListener("pointercancel", () => held && change(before))
  for (const end of ["pointerup", "pointercancel"]) svg.addEventListener(end, () => { held = undefined })
}

// Play, Step back and Step before the slider `name` in `bar`; draw(part) shows this part of the way to its next value.
// With `begins`, it plays once by itself as soon as the reader sees the picture, and screen readers announce nothing.
// A step lasts `least` ms or more.
export const player = (place, bar, name, made, last, draw, { begins = false, least = 100 } = {}) => {
  const { state, change, button } = made
  let timer = 0, loop = false
  const stop = () => {
    cancelAnimationFrame(timer)
    clearTimeout(timer)
    timer = 0
    playing.textContent = "Play"
  }
  const go = to => { stop(); change({ [name]: to }) }
  const next = () => { change({ [name]: state[name] + 1 }); run() }
  const run = () => {
    if (state[name] >= last()) {
      if (!loop) return stop()
      timer = setTimeout(() => { change({ [name]: 0 }); run() }, 2000)
      return
    }
    const beat = Math.max(least, Math.min(1200, 9000 / last()))
    if (still()) { // no motion: one picture after the other
      timer = setTimeout(next, beat)
      return
    }
    const begin = performance.now()
    const frame = time => {
      const part = (time - begin) / beat
      if (part >= 1) return next()
      draw(Math.max(0, part * part * (3 - 2 * part)))
      timer = requestAnimationFrame(frame)
    }
    timer = requestAnimationFrame(frame)
  }
  const playing = button("Play", () => {
    if (timer) return go(state[name])
    if (state[name] >= last()) change({ [name]: 0 })
    playing.textContent = "Stop"
    run()
  })
  bar.prepend(playing, button("Step back", () => go(state[name] - 1)), button("Step", () => go(state[name] + 1)))
  place.addEventListener("input", stop)
  const asked = new URLSearchParams(place.dataset.state ?? location.search).has(name)
  if (begins && !asked && !still() && place.dataset.gallery === undefined) {
    const status = place.querySelector("[role=status]")
    const hush = on => {
      made.quiet = on
      status.setAttribute("aria-live", on ? "off" : "polite")
    }
    const seen = new IntersectionObserver(([{ isIntersecting }]) => {
      if (!isIntersecting) return
      seen.disconnect()
      hush(true)
      playing.textContent = "Stop"
      run()
    }, { threshold: 0.6 })
    seen.observe(place.querySelector(".instrument-drawing"))
    for (const event of ["pointerdown", "keydown", "input"]) {
      place.addEventListener(event, () => {
        seen.disconnect()
        hush(false)
      }, { once: true, capture: true })
    }
  }
  made.play = () => { stop(); loop = true; run() } // again and again, on the page of all instruments
  made.pause = stop
}
