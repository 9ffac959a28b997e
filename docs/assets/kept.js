// What the browser keeps of a page under one key: an object, and nothing but what was put there.
{
  const memory = {} // where the browser keeps nothing, the page does until it is left

  const read = key => {
    if (memory[key]) return memory[key]
    try {
      const value = JSON.parse(localStorage.getItem(key) ?? "{}")
      return value && typeof value === "object" && !Array.isArray(value) ? value : {}
    } catch {
      return {} // a private window, or not ours
    }
  }

  const change = (key, edit) => {
    const value = read(key) // read again: another tab may have written
    edit(value)
    try {
      localStorage.setItem(key, JSON.stringify(value))
    } catch {
      memory[key] = value
    }
  }

  window.kept = { read, change }
}
