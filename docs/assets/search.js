// The search: the worker that the theme's search box asks, in place of the theme's own.
//
// There is no index. The first question fetches the book's text, and each word is looked up in
// it as it stands, which takes about a millisecond. A rare word counts more than a frequent one,
// and so do two neighbours that are neighbours in the question too: that is what finds an error
// message of which numbers and paths are other ones here.

const [SETUP, READY, QUERY, RESULT] = [0, 1, 2, 3] // the messages of the theme
const LETTERS = Array.from({ length: 0x10000 }, (_, code) => /[\p{L}\p{N}]/u.test(String.fromCharCode(code)))
let book

addEventListener("message", async ({ data: { type, data } }) => {
  if (type === SETUP) {
    if (data.docs.length) book = made(data.docs) // in the zip, for a page of a disk fetches nothing
    postMessage({ type: READY })
  }
  if (type !== QUERY) return
  if (data.trim()) book ??= read()
  const found = data.trim() ? search(await book, data) : { items: [] }
  postMessage({ type: RESULT, data: found })
})

async function read() {
  const answer = await fetch(new URL("../search/text.json", self.location))
  return made(await answer.json())
}

function made(texts) {
  let from = 0
  const sections = texts.map(([location, title, prose, weight, code]) => {
    const plain = title.replace(/<[^>]+>/g, "")
    const [text, body] = [`${prose}\n${code}`, from + plain.length + 1]
    const section = { location, title, from, body, code: body + prose.length, length: text.length, plain, text, weight }
    from = body + text.length + 1
    return section
  })
  sections.forEach((section, i) => {
    section.number = i
    section.isPage = !section.location.includes("#")
    section.page = section.isPage ? section : sections[i - 1].page
  })
  const text = sections.map(({ plain, text }) => `${plain}\n${text}\n`).join("")
  const titled = new Map() // how many titles have a word
  for (const { plain } of sections) {
    for (const [word] of lower(plain).matchAll(/[\p{L}\p{N}]+/gu)) titled.set(word, (titled.get(word) ?? 0) + 1)
  }
  return { sections, text, titled, ...indexed(sections, text), average: from / sections.length }
}

const lower = text => text.replace(/İ/g, "I").toLowerCase() // of the same length

// ---- the index: where each word of the book is

const [TITLE, PROSE, CODE] = [0, 1, 2]

/** The words of the text, in order: where each one begins, its section; and the places of each word. */
function indexed(sections, text) {
  const low = lower(text)
  const ids = new Map() // of each word: its number
  const most = text.length >> 1
  const begins = new Int32Array(most), section = new Uint16Array(most), kind = new Uint8Array(most)
  const [entries, entryPlaces] = [new Int32Array(most), new Int32Array(most)]
  let [count, entry, current] = [0, 0, 0]
  sections[0].token = 0
  const note = (from, to, place) => {
    const word = low.slice(from, to)
    let id = ids.get(word)
    if (id === undefined) ids.set(word, id = ids.size)
    entries[entry] = id
    entryPlaces[entry++] = place
  }
  for (let at = 0; at < text.length; at++) {
    if (!LETTERS[text.charCodeAt(at)]) continue
    const [start, first] = [at, count]
    while (sections[current + 1]?.from <= at) sections[++current].token = count
    for (let from = at; LETTERS[text.charCodeAt(from)]; from = at) {
      at++
      while (LETTERS[text.charCodeAt(at)] && !isHump(text, low, at)) at++
      begins[count] = from
      section[count] = current
      kind[count] = from < sections[current].body - 1 ? TITLE : from < sections[current].code ? PROSE : CODE
      note(from, at, count++)
    }
    if (count > first + 1) note(start, at, first) // DataLoader is found as dataloader, too
  }
  const words = [...ids.keys()]
  const starts = new Int32Array(words.length + 1)
  for (let i = 0; i < entry; i++) starts[entries[i] + 1]++
  for (let i = 0; i < words.length; i++) starts[i + 1] += starts[i]
  const [next, places] = [starts.slice(), new Int32Array(entry)]
  for (let i = 0; i < entry; i++) places[next[entries[i]]++] = entryPlaces[i]
  const stems = new Map()
  for (const [word, id] of ids) {
    const key = stem(word)
    stems.has(key) ? stems.get(key).push(id) : stems.set(key, [id])
  }
  const placesOf = id => places.subarray(starts[id], starts[id + 1])
  return { begins, section, kind, ids, stems, placesOf, sorted: words.sort() }
}

/** Whether a word begins inside a name such as DistributedDataParallel. */
const isHump = (text, low, at) => text[at] !== low[at] &&
  (text[at - 1] === low[at - 1] || (text[at + 1] === low[at + 1] && LETTERS[text.charCodeAt(at + 1)]))

/** An English word without its ending: compile, compiled and compilation have the same stem. */
function stem(word) {
  if (word.length < 4 || !/^[a-z]+$/.test(word)) return word
  const plain = word.replace(/ie[sd]$/, "y").replace(/([^su])s$/, "$1")
  const bare = plain.replace(/(ation|ing|ion|ed|er|ly)$/, "")
  const short = bare.length > 2 && /[aeiouy]/.test(bare) ? bare : plain
  return short.replace(/([bdfgmnprt])\1$/, "$1").replace(/(?<=...)e$/, "")
    .replace(/(?<=....)at$/, "").replace(/(?<=...)is$/, "iz")
}

// ---- the question: its words, and what each one may be called in the book

const ALONE = 5 // sections that come one by one
const [MOST, NAME, BEFORE] = [110, 20, 0.3] // words of a question, before its error; what one of these counts

// Words of other people for what the book may call otherwise. The words of a line stand for one another.
const SAME = `
  hang stuck freeze frozen deadlock stall
  slow slower slowdown throughput
  crash die abort fail
  spike jump
  grow increase leak
  machine node
  resume restart reload
  unequal uneven different
  same identical
  gpu device
  wrong incorrect
`.trim().split("\n").map(line => line.trim().split(" ").map(stem))
const SHORT = Object.entries({ // what is written in another way
  "it/s|its/s": "iterations per second throughput", oom: "out of memory", vram: "gpu memory", ram: "host memory",
  "time[ds]? out": "timeout", "timeouts?": "timed out", lr: "learning rate", ckpt: "checkpoint", amp: "autocast mixed precision", "multi[- ]?gpus?": "several gpus",
}).map(([short, long]) => [new RegExp(`(?<![\\w.])(?:${short})(?![\\w.=(])`, "gi"), long])
const COMMON = new Set(`a about after all also am an and any are as at be been but by can cannot could did do does doing
  for from get gets give given go had has have having he how i if in into is it its just me more most my no not of on
  one or other our out own please same she should so some such than that the their them then there these they this
  those to too use used using very was way we were what when where which while who why will with without would you
  your error errors runtimeerror valueerror exception traceback recent call last file line module raise problem
  issue help`.split(/\s+/))

const STAMP = /\[?\b([EWIF])\d{3,4} \d\d:\d\d:\d\d[.\d]* (?:\d+ )?\S+?:\d+\]/g // of a line that C++ or torch logged

/** The words of a question, each with its place and with how much it counts. */
function questions(query) {
  let plain = query
    .replace(/\x1b?\[[\d;]*m/g, " ") // colours of a terminal
    .replace(/\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]*Z?/g, " ") // when a line was logged
    .replace(STAMP, (all, level) => "EF".includes(level) ? " \u0002 " : " \u0001 ")
    .replace(/frame #\d+: .*?(\(0x[\da-f]+ in [^)]*\)|\[0x[\da-f]+\])/g, " ") // of a stack in C++
    .replace(/\[?rank\d+\]:?(?=\s)/g, " ")
    .replace(/File "[^"]*", line \d+, in \S+(?:(?:(?!File "|(?:Error|Exception):)[^]){0,300}(?=File "|[~^]{3}))?/g, " ") // of a traceback
    .replace(/(?<![\w.])(\w:|~|\.+)?([\/\\][\w.+-]+)+[\/\\]/g, " ") // a file's name is enough
  for (const [short, long] of SHORT) plain = plain.replace(short, `$& ${long}`)
  const all = []
  for (const { 0: run, index } of plain.matchAll(/[\p{L}\p{N}]+|[\u0001\u0002]/gu)) {
    let at = index
    for (const part of run.split(/(?<=\p{Ll})(?=\p{Lu})|(?=\p{Lu}\p{Ll})/u)) {
      all.push({ word: lower(part), at })
      at += part.length
    }
  }
  const found = all
  // Of a log the last error counts, its name and what follows; where there is none, the end.
  const said = Math.max(...["error:", "exception:"].map(word => lower(plain).lastIndexOf(word)))
  const logged = plain.indexOf("\u0002")
  const traced = plain.lastIndexOf("(most recent call last)")
  const begin = said >= 0 ? plain.lastIndexOf(" ", said) : Math.max(logged, traced)
  const error = found.findIndex(({ at }) => begin >= 0 && at >= begin)
  const end = Math.max(0, found.length - MOST)
  const from = error < 0 ? end : Math.min(Math.max(0, error - NAME), end)
  let warned = false
  return found.slice(from, Math.max(from, error) + MOST)
    .map((each, i) => {
      if (each.word < "\u0003") warned = each.word === "\u0001" && error >= 0 && from + i >= error
      return { ...each, weigh: from + i < error || warned ? BEFORE : 1 }
    })
    .filter(({ word }) => word > "\u0003")
}

// ---- what of the book is meant by a word

const P = globalThis.PARAMS ?? {stem: 1, prefix: 0.7, same: 0.5, code: 0.56, k: 0.75, b: 0.5, title: 1, cover: 1.5, page: 1.5, above: 0.25, all: 0.6, near: 0.82, pair: 1.13, common: 0.3, small: 0.2, span: 40, pointer: 1, failure: 1, first: 0.46, joined: 1}

/** The forms of a word, each with its weight; in a list for the word itself, and one for each other name. */
function forms(book, word, open) {
  const { ids, stems, sorted } = book
  const own = new Map()
  const add = (id, weight) => own.set(id, Math.max(weight, own.get(id) ?? 0))
  for (const id of stems.get(stem(word)) ?? []) add(id, P.stem)
  if (ids.has(word)) add(ids.get(word), 1)
  if (open || word.length > 4) {
    for (let i = first(sorted, word); sorted[i]?.startsWith(word); i++) add(ids.get(sorted[i]), P.prefix)
  }
  const key = stem(word)
  const others = (SAME.find(keys => keys.includes(key)) ?? []).filter(each => each !== key)
    .map(each => new Map((stems.get(each) ?? []).map(id => [id, P.same])))
  return [own, ...others].filter(each => each.size)
}

/** Where in a sorted list `item` is, or would be. */
function first(list, item) {
  let [low, high] = [0, list.length]
  while (low < high) {
    const middle = (low + high) >> 1
    if (list[middle] < item) low = middle + 1
    else high = middle
  }
  return low
}

/** The places of several words, in order. */
function placesOf(book, forms) {
  const all = [...forms.keys()].map(book.placesOf)
  if (all.length === 1) return all[0]
  const joined = new Int32Array(all.reduce((sum, { length }) => sum + length, 0))
  let at = 0
  for (const each of all) {
    joined.set(each, at)
    at += each.length
  }
  return joined.sort()
}

/** Where a word of `first` is followed by one of `then`. */
function neighbours(first, then) {
  const found = []
  let next = 0
  for (const place of first) {
    while (then[next] <= place) next++
    if (then[next] <= place + 2) found.push(then[next])
  }
  return found
}

/** A number or a letter, which hardly tells what is meant. */
const isSmall = word => word.length < 2 || /^\d+$/.test(word)

// ---- sections: how much of the question each one has

function search(book, query) {
  const asked = questions(query)
  if (!asked.length) return { items: [] }
  const { sections, section: sectionOf, kind } = book
  const size = sections.length
  const rarity = number => Math.log(1 + size / (number + 0.5))
  const [times, title] = [new Float32Array(size), new Float32Array(size)]
  /** Note how often each section has a word, and whether its title does; return the sections that have it. */
  const count = (places, weight, found) => {
    for (const place of places) {
      const number = sectionOf[place]
      if (!times[number] && !title[number]) found.push(number)
      if (kind[place] === TITLE) title[number] = Math.max(title[number], weight)
      else times[number] += kind[place] === PROSE ? weight : weight * P.code
    }
  }
  const clear = found => {
    for (const number of found) times[number] = title[number] = 0
  }
  const many = number => times[number] / (times[number] + P.k * (1 - P.b + P.b * sections[number].length / book.average))

  // ---- the words, one by one

  const words = [] // each: its weight, and what it is worth in each section and its title
  const isTold = new Set(asked.filter(({ word }) => !COMMON.has(word) && !isSmall(word)).map(({ word }) => word)).size > 2
  const last = asked.at(-1)
  for (const each of asked) {
    const { word } = each
    const lists = forms(book, word, each === last)
    each.places = lists.length ? placesOf(book, lists[0]) : []
    if (words.some(other => other.word === word) || (isTold && COMMON.has(word))) continue
    const weigh = each.weigh * (isSmall(word) ? P.small : COMMON.has(word) ? P.common : 1)
    const here = { word, weight: rarity(0) * weigh, text: new Float32Array(size), title: new Float32Array(size) }
    lists.forEach((list, i) => {
      const found = []
      for (const [id, weight] of list) count(book.placesOf(id), weight, found)
      const worth = rarity(found.length) * weigh
      if (!i) here.weight = worth
      for (const number of found) {
        here.text[number] = Math.max(here.text[number], many(number) * Math.min(worth, here.weight))
        here.title[number] = Math.max(here.title[number], title[number] * Math.min(worth, here.weight))
      }
      clear(found)
    })
    words.push(here)
  }

  // ---- and two by two, as they follow each other

  const pairs = { text: new Float32Array(size), title: new Float32Array(size) }
  asked.forEach((then, i) => {
    const before = asked[i - 1]
    if (!i || then.at - before.at > before.word.length + 12) return
    const two = [before.word, then.word]
    const found = []
    count(neighbours(before.places, then.places), 1, found)
    const joined = book.ids.get(before.word + then.word) // data loader: dataloader
    if (joined !== undefined) count(book.placesOf(joined), P.joined, found)
    const less = two.every(isSmall) ? P.small : two.every(word => COMMON.has(word) || isSmall(word)) ? P.common : 1
    const worth = rarity(found.length) * then.weigh * P.pair * less
    for (const number of found) {
      pairs.text[number] += worth * many(number)
      pairs.title[number] += worth * title[number]
    }
    clear(found)
  })

  // ---- what is in a page's title counts for its sections; what stands together counts more

  const weights = new Map(words.map(({ word, weight }) => [word, weight]))
  const total = words.reduce((sum, { weight }) => sum + weight, 0)
  const [text, titled, has, covered, above] = Array.from({ length: 5 }, () => new Float32Array(size))
  text.set(pairs.text)
  titled.set(pairs.title)
  for (const word of words) {
    for (let number = 0; number < size; number++) {
      if (!word.text[number] && !word.title[number]) continue
      text[number] += word.text[number]
      titled[number] += word.title[number]
      has[number] += word.weight
      if (!word.title[number]) continue
      covered[number] += word.word.length / sections[number].plain.length
      if (!sections[number].isPage) continue
      for (let below = number + 1; below < size && !sections[below].isPage; below++) {
        above[below] += Math.max(0, word.title[number] - word.title[below])
      }
    }
  }
  const ranked = []
  sections.forEach(({ number, weight, isPage }) => {
    if (!has[number]) return
    const named = titled[number] * (1 + P.cover * covered[number]) * (isPage ? P.page : 1)
    const sum = text[number] + P.title * named + P.above * above[number]
    ranked.push({
      number,
      weight: weight < 1 ? weight * P.pointer : weight ** P.failure,
      score: sum * (1 - P.all + P.all * has[number] / total),
    })
  })
  ranked.sort((a, b) => b.score * b.weight - a.score * a.weight).splice(200)
  const distinct = asked.filter(({ word }, i) => asked.findIndex(each => each.word === word) === i && !COMMON.has(word))
  for (const each of ranked.slice(0, 60)) {
    const [most, place] = nearest(book, each.number, distinct, weights)
    each.score += P.near * most
    each.place = place
  }
  for (const each of ranked) each.score *= each.weight
  ranked.sort((a, b) => b.score - a.score)

  // ---- the answer, as the theme wants it

  // The best sections come one by one, also several of a page, and the others page by page. The theme
  // shows the page above its section, so the page itself follows a section that is nearly as good.
  const telling = words.filter(({ weight }) => weight > 1.2 || words.length < 3)
  const best = ranked.filter(({ score }) => score > ranked[0].score / 5)
    .map(({ number, score, place }) => ({ ...sections[number], score, place }))
  for (const page of best.filter(({ isPage }) => isPage)) {
    const inside = best.find(each => !each.isPage && each.page.location === page.location)
    if (inside?.score > page.score * P.first) [inside.score, page.score] = [Math.max(inside.score, page.score), 0]
  }
  best.sort((a, b) => b.score - a.score)
  const groups = best.splice(0, ALONE).filter(({ score }) => score).map(section => [section])
  const pages = new Map()
  for (const section of best) {
    const { location } = section.page
    if (!section.score || (!pages.has(location) && pages.size === 30)) continue
    const here = pages.get(location) ?? []
    if (here.length < 6) pages.set(location, [...here, section])
  }
  const mark = marker(telling.map(({ word }) => word))
  const shown = section => ({
    location: section.location,
    title: section.title.split(/(<[^>]+>)/).map((part, i) => i % 2 ? part : mark(part)).join(""),
    text: mark(teaser(book, section)),
    score: section.score,
    terms: Object.fromEntries(telling.map(({ word, text, title }) =>
      [word, Boolean(text[section.number] || title[section.number])])),
  })
  const items = [...groups, ...pages.values()].map(found =>
    [...found, ...found.some(({ isPage }) => isPage) ? [] : [{ ...found[0].page, score: 0 }]].map(shown))
  return { items, suggest: suggest(book, last.word) }
}

/** Where most of the question stands together in a section, and how much of it that is. */
function nearest({ begins, sections }, number, asked, weights) {
  const { token, body } = sections[number]
  const end = sections[number + 1]?.token ?? begins.length
  const within = []
  for (const { word, places } of asked) {
    for (let i = first(places, token); places[i] < end; i++) within.push({ word, place: places[i] })
  }
  within.sort((a, b) => a.place - b.place)
  const times = new Map()
  let [sum, from, most, place] = [0, 0, 0, 0]
  for (const each of within) {
    while (within[from].place < each.place - P.span) {
      const { word } = within[from++]
      times.set(word, times.get(word) - 1)
      if (!times.get(word)) sum -= weights.get(word)
    }
    if (!times.get(each.word)) sum += weights.get(each.word)
    times.set(each.word, (times.get(each.word) ?? 0) + 1)
    if (sum > most) [most, place] = [sum, within[from].place]
  }
  return [most, begins[place]]
}

/** The lines around the place that has most of the question. */
function teaser({ text }, { body, text: { length }, place }) {
  const from = Math.max(body, place ?? body)
  const line = Math.max(body, from - 60, text.lastIndexOf("\n", from - 1) + 1)
  const to = Math.min(body + length, line + 240)
  const cut = text.slice(line, to).replace(/\S*$/, last => to < body + length ? "" : last)
  return (line > body ? "… " : "") + cut + (to < body + length ? " …" : "")
}

/** What makes HTML of text, with the words of the question in it marked. */
function marker(words) {
  const escape = text => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;")
  const stems = new Set(words.map(stem))
  const marked = part => {
    const word = lower(part)
    const begin = words.find(each => word.startsWith(each))
    const length = stems.has(stem(word)) ? part.length : begin ? begin.length : 0
    return length ? `<mark>${escape(part.slice(0, length))}</mark>${escape(part.slice(length))}` : escape(part)
  }
  return text => text.split(/([\p{L}\p{N}]+)/u)
    .map((part, i) => i % 2 ? marked(part) : escape(part)).join("")
}

/** What the word begun may become: the word of most titles. */
function suggest({ titled }, begun) {
  let best = []
  for (const [word, times] of titled) if (word.startsWith(begun) && !(times < best[1])) best = [word, times]
  return best.slice(0, 1)
}
