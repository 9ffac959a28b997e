// Starts the small instruments of a chapter: each loads its module a little before it comes into view.

const places = document.querySelectorAll(".instrument[data-instrument]")
if (places.length) {
  const { base } = JSON.parse(document.getElementById("__config").textContent)
  const folder = new URL(`${base}/assets/instruments/`, location)

  let styled
  const style = () => styled ??= new Promise(done => {
    const link = document.createElement("link")
    link.rel = "stylesheet"
    link.href = new URL("base.css", folder)
    link.onload = link.onerror = done
    document.head.append(link)
  })

  const start = async place => {
    const [module] = await Promise.all([
      import(place.dataset.module ?? new URL(`${place.dataset.instrument}.js`, folder)), style()])
    module.start(place)
  }

  const observer = new IntersectionObserver(entries => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue
      observer.unobserve(target)
      start(target)
    }
  }, { rootMargin: "300px" })
  places.forEach((place, i) => {
    place.id = `${place.dataset.instrument}-${i + 1}`
    observer.observe(place)
  })
}
